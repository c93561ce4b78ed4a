"""Mutations of the JSON files that conversions read, and what may come of each."""
