"""Finds the target that fits the place of an output."""

from __future__ import annotations

from pathlib import Path

from deepinfer_prep.errors import PrepError
from deepinfer_prep.files.storage import Place
from deepinfer_prep.writing.local_target import LocalTarget
from deepinfer_prep.writing.target import Target


def open_target(output: Place) -> Target:
    """The output at a place.

    Raises:
        PrepError: nothing can be written there.
    """
    if isinstance(output, Path):
        return LocalTarget(output)
    if str(output).startswith("s3://"):
        from deepinfer_prep.remote.s3_target import open_s3_target

        return open_s3_target(output)
    raise PrepError(f"{output}: an output cannot be written there. Give a folder.", code="no-target")
