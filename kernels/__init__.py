"""NKI kernels for Trainium2, each with a torch reference."""
