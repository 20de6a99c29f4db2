"""Training of an MTP head for a model that has none, on text that the model writes itself."""
