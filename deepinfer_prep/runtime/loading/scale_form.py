"""The form in which a scale is attached to its weight, where a host wants another one than the checkpoint's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer_prep.runtime.dtypes import FLOAT_NAMES

_WORDS = (torch.int16, torch.int32)
_EXACT_FLOATS = {
    torch.float16: (torch.float16, torch.float32, torch.float64),
    torch.bfloat16: (torch.bfloat16, torch.float32, torch.float64),
    torch.float32: (torch.float32, torch.float64),
    torch.float64: (torch.float64,),
    torch.float8_e8m0fnu: (torch.bfloat16, torch.float32, torch.float64),
}
"""For each dtype of a scale the float dtypes that hold all of its values."""


class ScaleFormError(ValueError):
    """A scale has no such form without a change of its values; the message says why."""


@dataclass(frozen=True, slots=True)
class ScaleForm:
    """How a weight's `.sf` is to lie in memory.

    Attributes:
        dtype: float32, bfloat16 or another float dtype for values; float8_e8m0fnu or uint8 for e8m0 bytes; int16 or
            int32 for e8m0 bytes packed little-endian into words along the columns. None leaves it as it is stored.
        column_major: whether the values of a column, not those of a row, lie one after the other.
    """

    dtype: torch.dtype | None = None
    column_major: bool = False

    def check(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        """Check that stored scales of this dtype and shape have this form exactly, whatever their values.

        Raises:
            ScaleFormError: they do not.
        """
        if self.column_major and len(shape) < 2:
            raise ScaleFormError(f"a scale of shape {list(shape)} has no columns to lay out one after the other")
        if self.dtype is None or self.dtype in _EXACT_FLOATS.get(_values(dtype), ()):
            return
        if _values(dtype) != torch.float8_e8m0fnu or self.dtype in FLOAT_NAMES:
            raise ScaleFormError(f"a scale of {dtype} cannot be delivered as {self.dtype} without changing its values")
        if self.dtype in _WORDS and (not shape or shape[-1] % self.dtype.itemsize):
            raise ScaleFormError(
                f"e8m0 scales of shape {list(shape)} do not fill words of {self.dtype} ({self.dtype.itemsize} columns "
                "each)"
            )
        if self.dtype not in (torch.float8_e8m0fnu, torch.uint8, *_WORDS):
            raise ScaleFormError(f"{self.dtype} is no form of a scale: expected a float dtype, e8m0 bytes or words")

    def apply(self, scale: torch.Tensor) -> torch.Tensor:
        """The scale in this form, which `check` has found to be possible."""
        values = scale.detach()
        if self.dtype is not None and self.dtype in FLOAT_NAMES:
            values = values.view(_values(values.dtype)).to(self.dtype)
        elif self.dtype is not None:
            values = values.contiguous().view(self.dtype)
        if self.column_major:
            # Not contiguous(), which leaves any stride on an axis of one element.
            values = values.mT.clone(memory_format=torch.contiguous_format).mT
        return values


AS_STORED = ScaleForm()


def _values(dtype: torch.dtype) -> torch.dtype:
    """The dtype whose values the elements are: e8m0 bytes are stored as uint8, too."""
    return torch.float8_e8m0fnu if dtype == torch.uint8 else dtype
