"""What the values of scales and zero points say before a conversion: that a weight would not be what it seems."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepinfer_prep import fp8
from deepinfer_prep.errors import ConversionError
from deepinfer_prep.files.container import read_stored
from deepinfer_prep.files.storage import Readers
from deepinfer_prep.planning.plan import OutputFile, Plan
from deepinfer_prep.quantized import DTYPES, FLOAT_DTYPES, FP8_DTYPE, DtypeKind, element_bytes
from deepinfer_prep.writing.output_bytes import describe_element, tensor_at

_Values = npt.NDArray[np.float64]

IMPLAUSIBLE = 32.0
"""From this scale on a weight reads as 448 x 32 = 14,336 and more, and as 14 and less if the scale divides."""
SUSPICIOUS = 0.1
"""From this scale on a weight reads as 45 and more, which only a largest value taken for a scale usually gives."""
NO_WEIGHT_SIZE = 8.0
"""No trained matrix has such values in its middle, which are 0.01 to 0.1; read as the largest value of its block, the
scale gives 0.02 and more."""
_LARGEST_CODE = 448
_WINDOW_BYTES = 256 * 1024
_MOST_AT_ONCE = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class WeightSize:
    """What a weight's values are, if its scale multiplies."""

    where: str
    """The weight with its file, for messages."""
    scale: str
    middle_scale: float
    """The median of the scales that were read."""
    middle: float
    """The median of the values of the codes that were read and are not zero, times `middle_scale`; 0 where they are too
    few or too much alike to be a trained weight's."""
    largest_code: float
    """The largest value of a code that was read."""


class ScaleJudge:
    """Looks at the values of weight scales while they are read; for several threads."""

    def __init__(self, plan: Plan) -> None:
        self._ignored = frozenset(plan.activation_scales)
        self._refuses = plan.options.implausible_scales == "refuse"
        self._largest: dict[str, float] = {}
        self._sizes: tuple[WeightSize, ...] = ()

    def look(self, file: OutputFile, offset: int, doubled: fp8.U8, dtype: str) -> None:
        """Look at scales of one dtype, already doubled, that stand at byte `offset` of a file's data section.

        Raises:
            ConversionError: a scale is negative, or so large that it cannot be meant to multiply.
        """
        size = element_bytes(dtype)
        for start in range(0, len(doubled), _WINDOW_BYTES):
            values = read_values(doubled[start : start + _WINDOW_BYTES], dtype) / 2
            for index in self._first_of_tensors(file, offset + start, size, values):
                position, value = offset + start + index * size, float(values[index])
                if self._refuses and (value >= IMPLAUSIBLE or value < 0):
                    raise ConversionError(_explain(describe_element(file, position), value))
                name = tensor_at(file, position).name
                self._largest[name] = max(value, self._largest.get(name, value))

    def _first_of_tensors(self, file: OutputFile, offset: int, size: int, values: _Values) -> Iterator[int]:
        """The first element of each weight scale that is not plausible, or else one that is suspicious."""
        for wrong in ((values >= IMPLAUSIBLE) | (values < 0), values >= SUSPICIOUS):
            found = np.flatnonzero(wrong)
            while found.size:
                tensor = tensor_at(file, offset + int(found[0]) * size)
                if tensor.name not in self._ignored:
                    yield int(found[0])
                found = found[found * size + offset >= tensor.end]

    @property
    def unusual(self) -> list[str]:
        """The scales that are unusually large, the largest first."""
        return sorted(self._largest, key=lambda name: -abs(self._largest[name]))

    def conclude(self, sizes: Iterable[WeightSize]) -> Iterator[str]:
        """Take the sizes of weights with such scales into account.

        Yields:
            A sentence for each weight that no model has and that a model would have if its scale were the block's
            largest value. A scale of 1 is none: with it all readings but that are the same.
        """
        self._sizes = tuple(sizes)
        for size in self._sizes:
            if self._refuses and size.middle >= NO_WEIGHT_SIZE and size.middle_scale != 1:
                yield (
                    f"{size.where}: with its scale, {size.middle_scale:.2g}, its values are {size.middle:,.2g} in the "
                    "middle of their sizes, where no model has 1. If the scale is the block's largest value, to be "
                    f"divided by 448 first, they are {size.middle / _LARGEST_CODE:.2g}. Look at the weight in the "
                    "original model; if the scale multiplies all the same, --implausible-scales accept converts it."
                )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is to be told of scales that are not refused."""
        largest_codes = {size.scale: size.largest_code for size in self._sizes}
        told = [
            name
            for name in self.unusual
            if largest_codes.get(name, _LARGEST_CODE) * abs(self._largest[name]) >= SUSPICIOUS * _LARGEST_CODE
        ]
        if not told:
            return ()
        name, value = told[0], self._largest[told[0]]
        return (
            f"{len(told):,} scales are unusually large, {name} with {value:g} among them: the largest code, "
            f"{_LARGEST_CODE}, then stands for {_LARGEST_CODE * value:,.0f}. If it is the block's largest value or a "
            "divisor and no factor, readers of this format are off, and so is the output: compare a weight with the "
            "original model.",
        )


def read_values(stored: fp8.U8, dtype: str) -> _Values:
    """The values of scales as they are stored: floats, or e8m0 exponents."""
    if dtype in FLOAT_DTYPES:
        return fp8.widen(stored, dtype).astype(np.float64)
    return np.asarray(np.ldexp(1.0, stored.astype(np.int32) - 127))


def _explain(element: str, value: float) -> str:
    if value < 0:
        return (
            f"{element} is {value:g}: a scale is not negative. The file is damaged or holds something else; if it is "
            "meant, --implausible-scales accept converts it."
        )
    return (
        f"{element} is the scale {value:g}: the largest code, 448, then stands for {448 * value:,.0f}, and for "
        f"{448 / value:,.2g} if the scale divides. No model has such weights, so this scale probably divides and "
        "must not be doubled. Look at the weight in the original model; if the scale multiplies all the same, "
        "--implausible-scales accept converts it."
    )


def find_nonzero(plan: Plan) -> Iterator[str]:
    """A sentence for each zero point beside an fp8 weight that is not zero, or that cannot be read as numbers.

    Raises:
        PrepError, OSError: a file cannot be read.
    """
    with closing(Readers()) as readers:
        for name in plan.zero_points:
            dtype = plan.checkpoint.tensors[name].dtype
            if dtype != FP8_DTYPE and DTYPES[dtype].kind not in (DtypeKind.FLOAT, DtypeKind.INTEGER):
                yield f"{plan.checkpoint.where(name)}: a zero point of dtype {dtype} cannot be read as numbers."
            elif not _is_zero(plan, name, readers):
                yield (
                    f"{plan.checkpoint.where(name)} is a zero point or offset and not zero: the weight is (code - zero "
                    "point) x scale, which halving the codes and doubling the scale does not keep. Use a checkpoint "
                    "with symmetric fp8 weights, or one in bf16."
                )


def _is_zero(plan: Plan, name: str, readers: Readers) -> bool:
    location = plan.checkpoint.location(name)
    tensor = location.tensor
    for start in range(0, tensor.nbytes, _MOST_AT_ONCE):
        content = read_stored(location, start, min(start + _MOST_AT_ONCE, tensor.nbytes), readers)
        if tensor.dtype == FP8_DTYPE:
            content &= 0x7F  # The sign of a zero says nothing.
        values = fp8.widen(content, tensor.dtype) if tensor.dtype in FLOAT_DTYPES else content
        if values.any():
            return False
    return True
