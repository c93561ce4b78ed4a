"""Computes the sidecar again from the main shards and compares it with the one in the output."""

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
from deepinfer_prep.kernel_scale import Absent, Derived, NoKernelScaleError, Stored, plan_kernel_scale
from deepinfer_prep.manifest import Manifest, WeightRecord
from deepinfer_prep.naming import MANIFEST_NAME, SIDECAR_FOLDER
from deepinfer_prep.quantized import QuantizedWeight
from deepinfer_prep.writing import sidecar
from deepinfer_prep.writing.sidecar import SidecarTensor


def check_sidecar(output: OpenOutput, manifest: Manifest) -> Iterator[Difference]:
    """hi and lo from each split matrix, kernel scales from the stored scales; nothing else may be there."""
    expected: dict[str, SidecarTensor] = {}
    for name in manifest.split:
        if name in output.main:
            expected |= {half.name: half for half in sidecar.halves(name, output.main[name])}
    for weight, record in manifest.weights.items():
        yield from _expect_kernel_scale(output, weight, record, expected)
    found = map(extent_of, output.in_sidecar.values())
    sources = (extent_of(expected[name].origin.source) for name in output.in_sidecar if name in expected)
    with closing(AheadReaders(found)) as in_sidecar, closing(AheadReaders(sources)) as main:
        for name, location in output.in_sidecar.items():
            if name not in expected:
                yield Difference(_name(location), "the manifest does not account for this sidecar tensor", name)
            else:
                yield from _compare(location, expected[name], in_sidecar, main)


def _expect_kernel_scale(
    output: OpenOutput, weight: str, record: WeightRecord, expected: dict[str, SidecarTensor]
) -> Iterator[Difference]:
    if (
        record.kernel_scale is None
        or record.tensor(weight) not in output.main
        or record.scale_tensor not in output.main
    ):
        return
    scale = output.main[record.scale_tensor]
    quantized = QuantizedWeight(weight, record.scale, record.element, record.block)
    kernel_scale = plan_kernel_scale(quantized, output.main[record.tensor(weight)].tensor, scale.tensor)
    if record.kernel_scale == record.scale:
        if not isinstance(kernel_scale, Stored):
            yield Difference(MANIFEST_NAME, "its stored scale is not of the kernels' form", weight)
    elif isinstance(kernel_scale, Derived):
        tensor = sidecar.derived_scale(weight, scale, kernel_scale)
        expected[tensor.name] = tensor
    else:
        problem = kernel_scale.reason if isinstance(kernel_scale, Absent) else "the stored scale is one already"
        yield Difference(MANIFEST_NAME, f"no kernel scale can be derived: {problem}", weight)


def _compare(found: Location, expected: SidecarTensor, in_sidecar: Readers, main: Readers) -> Iterator[Difference]:
    file, name = _name(found), expected.name
    if (found.tensor.dtype, found.tensor.shape) != (expected.dtype, expected.shape):
        problem = (
            f"expected {expected.dtype} {list(expected.shape)}, found {found.tensor.dtype} {list(found.tensor.shape)}"
        )
        yield Difference(file, problem, name)
        return
    position, item = 0, max(1, expected.nbytes // max(1, found.tensor.elements))
    try:
        for chunk in sidecar.tensor_chunks(expected, main):
            actual = read_stored(found, position, position + chunk.size, in_sidecar)
            if not np.array_equal(actual, chunk):
                first = (position + int(np.flatnonzero(actual != chunk)[0])) // item
                yield Difference(file, "is not what the main shards give", name, first)
                return
            position += chunk.size
    except (NoKernelScaleError, fp8.NoExactResultError) as error:
        yield Difference(file, f"cannot be recomputed from the main shards: {error}", name)


def _name(location: Location) -> str:
    """The file of a sidecar tensor, relative to the output."""
    return f"{SIDECAR_FOLDER}/{location.path.name}"
