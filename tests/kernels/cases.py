"""Inputs of the GEMM kernels and the bound that their results must meet, for the tests and check_kernels.py.

Importing this module imports the kernels: on AWS's `nki` where that is installed, on the emulator elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from nki_emulator import installed
from nki_emulator.install import real_nki
from torch import Tensor

from deepinfer_prep import kernel_layout

with installed():
    from deepinfer_prep.kernels import blockquant, reference

ON_SIMULATOR = real_nki() is not None
"""Whether kernels run on AWS's simulator, which keeps no record of instructions and takes no emulator options."""

FILLS = (
    "random",
    "zeros",
    "negative zeros",
    "outlier",
    "all codes",
    "lowest scales",
    "highest scales",
    "large",
    "tiny",
)
"""What a case is filled with. Codes are those that occur after halving: at most 0x77, sign aside."""


KMAJOR = "_kmajor"
"""Ends the name of a kernel that takes its weight in the kernel layout."""


@dataclass(frozen=True)
class Gemm:
    """One GEMM kernel: its name, its reference, and how its weights look."""

    name: str
    reference: Callable[..., Tensor]
    dequantize: Callable[..., Tensor]
    codes_per_byte: int
    scale_block: tuple[int, int]
    """Rows and columns that share a scale."""
    scale_bytes: tuple[int, int] | None
    """Scale bytes whose dequantized weights are all normal and finite bf16 numbers; None for float scales."""

    def oracle_input(self, x: Tensor) -> Tensor:
        """What the kernel multiplies with: x, or x after the fp8 round trip."""
        return reference.fp8_round_trip(x) if self.round_trip else x

    @property
    def round_trip(self) -> bool:
        """Whether the kernel takes x through fp8 and back."""
        return self.name.removesuffix(KMAJOR) in ("fp8_linear", "fp4_linear")

    @property
    def kernel_layout(self) -> bool:
        """Whether the kernel takes its weight in the kernel layout."""
        return self.name.endswith(KMAJOR)

    def kernel(self, cores: int) -> Any:
        """The kernel for 1 or 2 cores."""
        return getattr(blockquant, self.name if cores == 1 else f"{self.name}_2core")


_STORED = (
    Gemm("fp8_linear_raw", reference.fp8_linear_raw, reference.dequantize_fp8, 1, (32, 32), (10, 247)),
    Gemm("fp8_linear", reference.fp8_linear, reference.dequantize_fp8, 1, (32, 32), (10, 247)),
    Gemm("fp4_linear_raw", reference.fp4_linear_raw, reference.dequantize_fp4, 2, (1, 32), (8, 252)),
    Gemm("fp4_linear", reference.fp4_linear, reference.dequantize_fp4, 2, (1, 32), (8, 252)),
    Gemm("fp8_linear_block128", reference.fp8_linear_block128, reference.dequantize_block128, 1, (128, 128), None),
)


def _kmajor(gemm: Gemm) -> Gemm:
    name = gemm.name + KMAJOR
    return replace(gemm, name=name, reference=getattr(reference, name))


GEMMS = (*_STORED, *(_kmajor(gemm) for gemm in _STORED))


@dataclass(frozen=True)
class Case:
    """Arguments of one kernel call, with the weight in its stored order."""

    gemm: Gemm
    x: Tensor
    w: Tensor
    scale: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the kernel takes: the weight in its layout."""
        if not self.gemm.kernel_layout:
            return self.x, self.w, self.scale
        ordered = kernel_layout.weight_to_kernel_order(
            self.w.numpy(), "e2m1" if self.gemm.codes_per_byte == 2 else "e4m3"
        )
        return self.x, torch.from_numpy(ordered), self.scale


def make_case(gemm: Gemm, m: int, n: int, k: int, fill: str = "random") -> Case:
    """Arguments of the given sizes; the weights do not depend on m."""
    weights = torch.Generator().manual_seed(0)
    w, scale = _weights(gemm, n, k, fill, weights), _scales(gemm, n, k, fill, weights)
    return Case(gemm, _activations(m, k, fill, torch.Generator().manual_seed(1)), w, scale)


def _activations(m: int, k: int, fill: str, generator: torch.Generator) -> Tensor:
    x = torch.randn(m, k, generator=generator)
    if fill == "zeros":
        x.zero_()
    elif fill == "negative zeros":
        x = torch.where(x > 1.0, x, -0.0)
    elif fill == "outlier":
        x *= 2.0**-10
        x[torch.arange(m), torch.randint(k, (m,), generator=generator)] = 4096.0
    elif fill in ("large", "tiny"):
        x *= 2.0**40 if fill == "large" else 2.0**-40
    elif fill == "highest scales":
        x *= 2.0**-30
    return x.to(torch.bfloat16)


def _weights(gemm: Gemm, n: int, k: int, fill: str, generator: torch.Generator) -> Tensor:
    size = (n, k // gemm.codes_per_byte)
    if gemm.codes_per_byte == 2:
        if fill == "all codes":
            return torch.arange(n * k // 2).reshape(size).to(torch.uint8)
        return torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    codes = torch.tensor([sign | code for sign in (0x00, 0x80) for code in range(0x78)], dtype=torch.uint8)
    if fill == "all codes":
        return codes.repeat(n * k // len(codes) + 1)[: n * k].reshape(size)
    if fill == "negative zeros":
        codes = torch.tensor([0x80, 0x00, 0x38], dtype=torch.uint8)
    return codes[torch.randint(len(codes), size, generator=generator)]


def _scales(gemm: Gemm, n: int, k: int, fill: str, generator: torch.Generator) -> Tensor:
    rows, columns = gemm.scale_block
    size = (-(-n // rows), -(-k // columns))
    if gemm.scale_bytes is None:
        unit = {"lowest scales": 2.0**-100, "highest scales": 2.0**100}.get(fill, 2.0**-8)
        return (torch.rand(size, generator=generator) + 0.01) * unit
    low, high = gemm.scale_bytes
    first, last = {"lowest scales": (0, low), "highest scales": (high - 7, high)}.get(fill, (112, 127))
    return torch.randint(first, last + 1, size, generator=generator, dtype=torch.uint8)


def error_ratio(gemm: Gemm, case: Case, y: Tensor, weights: Tensor | None = None) -> float:
    """Largest error of y against float64, in units of the allowed 2^-8 |y| + 2^-20 sum |x w|.

    Numbers below 2^-126 may be flushed, and a scale byte of 0 is read as zero: 240 * 2^-127 |x| an element. `weights`
    are the dequantized ones in float64, where the caller has them already.
    """
    x = gemm.oracle_input(case.x).double()
    w = gemm.dequantize(case.w, case.scale, torch.float64) if weights is None else weights
    exact = x @ w.T
    flushed = 2.0**-126 + 2.0**-119 * x.abs().sum(dim=-1, keepdim=True)
    allowed = 2.0**-8 * exact.abs() + 2.0**-20 * (x.abs() @ w.abs().T) + flushed
    return float(((y.double() - exact).abs() / allowed).max())
