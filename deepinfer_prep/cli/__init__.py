"""The command line: parses arguments, calls the public functions, prints what they return."""

from __future__ import annotations

from deepinfer_prep.cli.main import main

__all__ = ["main"]
