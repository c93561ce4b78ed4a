"""How graph inputs and outputs that share a storage are passed as bytes."""
