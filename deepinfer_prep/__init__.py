"""Prepare fp8 checkpoints for AWS Trainium2, once, offline and exactly."""

from deepinfer_prep._version import __version__

__all__ = ["__version__"]
