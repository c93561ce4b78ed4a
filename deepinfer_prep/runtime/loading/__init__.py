"""Reads tensors of a prepared checkpoint into a model's parameters, whole or sliced for one rank."""
