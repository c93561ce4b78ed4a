"""Checks that the scales of an output are finite numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np

from deepinfer_prep import fp8
from deepinfer_prep.checking.findings import Difference
from deepinfer_prep.checking.structure import OpenOutput
from deepinfer_prep.files.container import Location, read_stored
from deepinfer_prep.files.read_ahead import AheadReaders, extent_of
from deepinfer_prep.files.storage import Readers
from deepinfer_prep.manifest import Manifest
from deepinfer_prep.quantized import DTYPES, FLOAT_DTYPES

_CHUNK_BYTES = 4 * 1024 * 1024


def check_scales(output: OpenOutput, manifest: Manifest) -> Iterator[Difference]:
    """Every scale of an e4m3 weight, in the order of the files: no e8m0 byte 255, no float that is NaN or infinite."""
    scales = {record.scale for record in manifest.weights.values() if record.element == "e4m3"}
    found = [location for name, location in output.main.items() if name in scales]
    with closing(AheadReaders(map(extent_of, found))) as readers:
        for location in found:
            yield from _check_scale(location, readers)


def _check_scale(location: Location, readers: Readers) -> Iterator[Difference]:
    item = DTYPES[location.tensor.dtype].bits // 8
    for start in range(0, location.tensor.nbytes, _CHUNK_BYTES):
        raw = read_stored(location, start, min(start + _CHUNK_BYTES, location.tensor.nbytes), readers)
        bad = ~_finite(raw, location.tensor.dtype)
        if bad.any():
            element = start // item + int(np.argmax(bad))
            yield Difference(location.path.name, "the scale is not finite", location.tensor.name, element)
            return


def _finite(raw: fp8.U8, dtype: str) -> np.typing.NDArray[np.bool_]:
    result: np.typing.NDArray[np.bool_] = np.isfinite(fp8.widen(raw, dtype)) if dtype in FLOAT_DTYPES else raw != 255
    return result
