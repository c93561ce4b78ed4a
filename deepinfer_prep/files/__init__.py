"""Bytes on disk: ranged reads and writes, safetensors headers, and the files that make up a checkpoint."""
