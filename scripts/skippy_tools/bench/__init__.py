"""Benchmarks: this product and its peers, side by side in one run."""
