"""Speculative decoding: the target decides, proposers only change how fast (spec 7)."""
