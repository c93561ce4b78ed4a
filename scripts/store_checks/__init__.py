"""What `store_check.py` checks on a store."""
