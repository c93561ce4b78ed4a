"""Halves the fp8 weights of a live model in memory and doubles their scales."""
