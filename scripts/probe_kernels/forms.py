"""What all probes share: the record of one, and loading and storing tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from nki_emulator import installed

with installed():
    import nki.isa as nisa
    import nki.language as nl

P = 128


@dataclass(frozen=True)
class Probe:
    """A kernel, its arguments, what it must return, and what to do where it does not."""

    kernel: Any
    arguments: tuple[torch.Tensor | int, ...]
    expected: torch.Tensor
    otherwise: str
    tolerance: float = 0.0
    """What an element may differ by, relative to the larger of 1 and its own magnitude; 0 asks for the same value."""
    free: torch.Tensor | None = None
    """Where anything may come out: True."""
    grid: int = 1

    def differences(self, found: torch.Tensor) -> int:
        """How many elements of `found` are not what they must be. A NaN equals a NaN."""
        if found.shape != self.expected.shape:
            return max(found.numel(), self.expected.numel())
        same = found == self.expected
        if found.is_floating_point():
            exact = self.expected.double()
            same = same | (found.isnan() & self.expected.isnan())
            near = (found.double() - exact).abs() <= self.tolerance * exact.abs().clamp(min=1.0)
            same = same | (near & exact.isfinite())
        if self.free is not None:
            same = same | self.free
        return int((~same).sum())


@dataclass(frozen=True)
class RateProbe:
    """What one more of something costs: two kernels that differ in how many they have of it, and the most it may take.

    Both must return what they should wherever they run; the time is taken on a device alone.
    """

    what: str
    more: Probe
    less: Probe
    extra: int
    """How many more `more` has."""
    limit: float
    """Seconds each."""
    otherwise: str


def loaded(source: Any) -> Any:
    """An argument of two or more dimensions in SBUF."""
    tile = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source)
    return tile


def stored(tile: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """A result that holds a tile of SBUF or PSUM."""
    copied = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=copied, src=tile)
    out = nl.ndarray(shape, dtype=dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=copied)
    return out
