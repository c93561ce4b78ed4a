"""Small checkpoints of every fp8 family, and the families' own rules to read them."""
