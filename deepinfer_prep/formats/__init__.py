"""How each checkpoint family pairs a weight with its scale."""
