"""How each kind of operation on fp8 values is rewritten to work on their bytes."""
