"""Block-quantized GEMMs: the kernel that fits a prepared weight, and the same arithmetic in torch elsewhere.

Weights are prepared by `prepare_model` or by loading a prepared checkpoint; the attributes are listed there.
`DEEPINFER_NEURON_NKI_GEMM=0` turns the kernels off, `DEEPINFER_NEURON_BQ_2CORE=0` the two-core kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from deepinfer_prep.errors import PrepError
from deepinfer_prep.kernels import reference
from deepinfer_prep.kernels.constants import K_MULTIPLE, M_MAX, N_MULTIPLE, TWO_CORE_N_MULTIPLE
from deepinfer_prep.runtime import kernel_launch, neuron
from deepinfer_prep.runtime.attributes import BLOCK128_SCALE, KERNEL_ORDER, KERNEL_SCALE, KERNEL_WEIGHT
from deepinfer_prep.runtime.kernel_scales import e8m0_values
from deepinfer_prep.runtime.prepare import prepare_model

__all__ = [
    "gemm",
    "has_kernel",
    "linear_qdq",
    "linear_qdq_gated",
    "linear_qdq_raw",
    "prepare_model",
    "supported",
]


@dataclass(frozen=True)
class _Operand:
    """One weight matrix as kernels take it."""

    weight: torch.Tensor
    """uint8 [n, k], or [n, k/2] for fp4."""
    scale: torch.Tensor
    k: int
    is_kmajor: bool = False
    """Whether its bytes stand in the kernels' order."""

    @property
    def n(self) -> int:
        return self.weight.shape[0]

    @property
    def is_fp4(self) -> bool:
        return self.weight.shape[1] != self.k

    @property
    def is_block128(self) -> bool:
        return self.scale.dtype == torch.float32


def has_kernel(w: torch.Tensor) -> bool:
    """Whether a weight is prepared for a kernel."""
    return hasattr(w, KERNEL_WEIGHT) and (hasattr(w, KERNEL_SCALE) or hasattr(w, BLOCK128_SCALE))


def supported(a: torch.Tensor, b: torch.Tensor, k: int, n: int) -> bool:
    """Whether a kernel runs for activations `a` and weight `b` with these (logical) k and n.

    It takes a Neuron device, a prepared weight, k % 128 == 0 and n % 32 == 0, and the switch not turned off.
    """
    fits = k % K_MULTIPLE == 0 and n % N_MULTIPLE == 0
    return fits and neuron.holds(a) and has_kernel(b) and kernel_launch.gemm_kernels()


def gemm(a: torch.Tensor, sfa: torch.Tensor, b: torch.Tensor, d: torch.Tensor, group: int | None = None) -> None:
    """d[:m] = dequant(a) @ dequant(b or b[group])^T, with `a` dequantized exactly to bf16.

    Args:
        a: float8_e4m3fn [m, k], or its bytes as uint8.
        sfa: e8m0 scales of its 1x32 blocks: float8_e8m0fnu or uint8 [m, k/32], or packed into int16 or int32
            words; further rows are ignored.
        b: a prepared weight [n, k], or [e, n, k] with `group`.
        d: bf16 [>= m, n], written in place.

    Raises:
        PrepError: `b` is not prepared, or `sfa` does not fit `a`.
    """
    m, k = a.shape
    factors = e8m0_values(sfa, m, k).repeat_interleave(reference.FP8_BLOCK, dim=-1)[:, :k]
    values = a.view(torch.float8_e4m3fn).float() * factors
    d[:m] = _linear(values.to(torch.bfloat16), _operand(b, k, group), round_trip=False)


def linear_qdq(x: torch.Tensor, w: torch.Tensor, group: int | None = None) -> torch.Tensor:
    """x @ dequant(w or w[group])^T: bf16 [m, k] -> bf16 [m, n].

    With a 32x32 e4m3 weight or an fp4 weight, x first goes to fp8 and back in 1x32 blocks (power-of-two scales, at
    most 224), in the kernel itself. With float scales of 128x128 blocks x is used as it is.

    Raises:
        PrepError: `w` is not prepared.
    """
    return _linear(x, _operand(w, x.shape[-1], group), round_trip=True)


def linear_qdq_raw(x: torch.Tensor, weight_u8: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`linear_qdq` for a bare weight, uint8 [n, k] or [n, k/2], and its kernel scale."""
    return _linear(x, _Operand(weight_u8, scale, x.shape[-1]), round_trip=True)


def linear_qdq_gated(x: torch.Tensor, w: torch.Tensor, group: int | None, flag: torch.Tensor) -> torch.Tensor | None:
    """`linear_qdq` with an fp4 expert where flag (int32 [1, 1]) is 1, zeros where it is not.

    On a Neuron device the kernel skips the work then. None where the gated kernel does not apply: `w` is no
    fp4 weight, n % 256 is not 0, or the two-core kernels are turned off.
    """
    if not has_kernel(w):
        return None
    operand = _operand(w, x.shape[-1], group)
    if not operand.is_fp4 or operand.n % TWO_CORE_N_MULTIPLE or not kernel_launch.two_core_gemm():
        return None
    name = "fp4_linear_kmajor_2core_gated" if operand.is_kmajor else "fp4_linear_2core_gated"
    if _on_kernel(x, operand):
        call = kernel_launch.kernel(name)
        return _launch(lambda rows: call(rows, operand.weight, operand.scale, flag), x, operand)
    x, weight = _padded(x, operand)
    return getattr(reference, name)(x, weight, operand.scale, flag)  # type: ignore[no-any-return]


def _operand(w: torch.Tensor, k: int, group: int | None) -> _Operand:
    if not has_kernel(w):
        raise PrepError(
            f"a weight of shape {list(w.shape)} is not prepared for a kernel. Call gemm.prepare_model(model), which "
            "logs why a weight cannot be, or load a prepared checkpoint; gemm.has_kernel(w) tells beforehand."
        )
    weight = getattr(w, KERNEL_WEIGHT)
    scale = getattr(w, KERNEL_SCALE if hasattr(w, KERNEL_SCALE) else BLOCK128_SCALE)
    is_kmajor = hasattr(w, KERNEL_ORDER)
    if group is None:
        return _Operand(weight, scale, k, is_kmajor)
    return _Operand(weight[group], scale[group], k, is_kmajor)


def _kernel_name(operand: _Operand, round_trip: bool) -> str:
    order = "_kmajor" if operand.is_kmajor else ""
    if operand.is_block128:
        return f"fp8_linear_block128{order}"
    name = "fp4_linear" if operand.is_fp4 else "fp8_linear"
    return f"{name}{order}" if round_trip else f"{name}_raw{order}"


def _linear(x: torch.Tensor, operand: _Operand, *, round_trip: bool) -> torch.Tensor:
    name = _kernel_name(operand, round_trip)
    if _on_kernel(x, operand):
        two_core = operand.n % TWO_CORE_N_MULTIPLE == 0 and kernel_launch.two_core_gemm()
        call = kernel_launch.kernel(f"{name}_2core" if two_core else name)
        return _launch(lambda rows: call(rows, operand.weight, operand.scale), x, operand)
    x, weight = _padded(x, operand)
    return getattr(reference, name)(x, weight, operand.scale)  # type: ignore[no-any-return]


def _on_kernel(x: torch.Tensor, operand: _Operand) -> bool:
    fits = operand.k % K_MULTIPLE == 0 and operand.n % N_MULTIPLE == 0
    return fits and neuron.holds(x) and kernel_launch.gemm_kernels()


def _launch(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, operand: _Operand) -> torch.Tensor:
    if x.shape[0] == 0:
        return x.new_empty(0, operand.n)
    parts = [call(rows.contiguous()) for rows in torch.split(x, M_MAX)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _padded(x: torch.Tensor, operand: _Operand) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the weight's bytes with zero columns up to whole scale blocks, as the references take them.

    A weight in the kernels' order has whole blocks: kernels take no other.
    """
    missing = operand.scale.shape[1] * (128 if operand.is_block128 else reference.FP8_BLOCK) - operand.k
    if missing == 0:
        return x, operand.weight
    bytes_missing = missing // 2 if operand.is_fp4 else missing
    return functional.pad(x, (0, missing)), functional.pad(operand.weight, (0, bytes_missing))
