"""Every decision about a conversion, made from headers alone before any tensor data is read."""
