"""Reads the JSON report that `verify --report FILE` wrote."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

from deepinfer_prep.errors import PrepError
from deepinfer_prep.files.storage import FileState, Place
from deepinfer_prep.naming import MANIFEST_NAME
from deepinfer_prep.report.figures import Verification


def read_verification(path: Path, output: Place) -> Verification:
    """Read what `verify` said of an output.

    Raises:
        PrepError: the file is no report of `verify`, or is one of another output.
        OSError: it cannot be read.
    """
    try:
        data = json.loads(path.read_bytes())
        of, differences, source = str(data["output"]), int(data["differences"]), data["source"]
    except (ValueError, KeyError, TypeError) as error:
        raise PrepError(
            f"{path} is no report of `deepinfer-prep verify` ({error!r}). Write one with verify --report FILE.",
            code="bad-verification",
        ) from None
    if not _is_same(of, output):
        raise PrepError(
            f"{path} is the report of another output, {of}, not of {output}. Verify this one with --report FILE.",
            code="bad-verification",
        )
    modified = path.stat().st_mtime
    return Verification(
        when=datetime.fromtimestamp(modified, timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        differences=differences,
        source=None if source is None else str(source),
        outdated=FileState.of(output / MANIFEST_NAME).modified_ns > modified * 1e9,
    )


def _is_same(named: str, output: Place) -> bool:
    return Path(named).resolve() == output.resolve() if isinstance(output, Path) else named == str(output)
