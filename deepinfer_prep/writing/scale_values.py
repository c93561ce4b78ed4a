"""What the values of scales and zero points say before a conversion: that a weight would not be what it seems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np

from deepinfer_prep import fp8
from deepinfer_prep.files.storage import Readers
from deepinfer_prep.planning.plan import Plan
from deepinfer_prep.quantized import DTYPES, FLOAT_DTYPES, DtypeKind

_MOST_AT_ONCE = 4 * 1024 * 1024


def find_nonzero(plan: Plan) -> Iterator[str]:
    """A sentence for each zero point beside an fp8 weight that is not zero, or that cannot be read as numbers.

    Raises:
        PrepError, OSError: a file cannot be read.
    """
    with closing(Readers()) as readers:
        for name in plan.zero_points:
            dtype = plan.checkpoint.tensors[name].dtype
            if DTYPES[dtype].kind not in (DtypeKind.FLOAT, DtypeKind.INTEGER):
                yield f"{plan.checkpoint.where(name)}: a zero point of dtype {dtype} cannot be read as numbers."
            elif not _is_zero(plan, name, readers):
                yield (
                    f"{plan.checkpoint.where(name)} is a zero point or offset and not zero: the weight is (code - zero "
                    "point) x scale, which halving the codes and doubling the scale does not keep. Use a checkpoint "
                    "with symmetric fp8 weights, or one in bf16."
                )


def _is_zero(plan: Plan, name: str, readers: Readers) -> bool:
    shard, tensor = plan.checkpoint.shards[plan.checkpoint.shard_of[name]], plan.checkpoint.tensors[name]
    reader = readers.get(shard.path)
    for start in range(tensor.start, tensor.end, _MOST_AT_ONCE):
        content = np.empty(min(_MOST_AT_ONCE, tensor.end - start), np.uint8)
        reader.read_into(content.data, shard.header.data_start + start)
        values = fp8.widen(content, tensor.dtype) if tensor.dtype in FLOAT_DTYPES else content
        if values.any():
            return False
    return True
