"""The one place where the version is written; it is recorded in every output."""

__version__ = "0.1.0"
