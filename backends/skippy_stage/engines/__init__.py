"""Stage engines: what computes a layer range."""
