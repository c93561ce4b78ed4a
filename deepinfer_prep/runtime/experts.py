"""Experts with fp4 or e4m3 weights in one launch: a kernel on a Neuron device, its steps elsewhere.

An expert is three GEMMs with SwiGLU between them. As kernels of their own they cost a call each, which at decode takes
longer than the work. `DEEPINFER_NEURON_NKI_GEMM=0` turns the kernel off. Weights are prepared as for `gemm`.
"""

from __future__ import annotations

import torch

from deepinfer_prep.kernels.constants import K_MULTIPLE, M_MAX, N_MULTIPLE, TWO_CORE_N_MULTIPLE
from deepinfer_prep.runtime import gemm, kernel_launch, neuron, norm
from deepinfer_prep.runtime.attributes import KERNEL_ORDER, KERNEL_SCALE, KERNEL_WEIGHT

__all__ = ["expert", "expert_gated", "expert_supported"]

_FP4_PER_BYTE = 2


def expert_supported(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether one kernel computes an expert: prepared weights on a Neuron device, GEMM kernels not off.

    The weights are all fp4, or all e4m3 with scales of 32x32 values; all row-major, or all in the kernels' order. x is
    bf16 with k % 128 == 0, and so is the inner width; on two cores inner width and result are multiples of 256, and the
    two-core kernels are not turned off.
    """
    if x.dtype != torch.bfloat16 or x.shape[0] == 0 or not neuron.holds(x) or not kernel_launch.gemm_kernels():
        return False
    if not all(gemm.has_kernel(w) and hasattr(w, KERNEL_SCALE) for w in (gate, up, down)):
        return False
    if len({hasattr(w, KERNEL_ORDER) for w in (gate, up, down)}) > 1:
        return False
    inner, n = (getattr(w, KERNEL_WEIGHT).shape[-2] for w in (gate, down))
    per_byte = {_codes_per_byte(w, k) for w, k in ((gate, x.shape[1]), (up, x.shape[1]), (down, inner))}
    one_core = neuron.physical_cores() < 2
    multiple = N_MULTIPLE if one_core else TWO_CORE_N_MULTIPLE
    fits = x.shape[1] % K_MULTIPLE == 0 == inner % K_MULTIPLE and inner % multiple == 0 == n % multiple
    return per_byte in ({1}, {2}) and fits and (one_core or kernel_launch.two_core_gemm())


def expert(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    weight: torch.Tensor | None = None,
    group: int | None = None,
) -> torch.Tensor:
    """down(swiglu(gate(x), up(x)) * weight), each GEMM as `gemm.linear_qdq`.

    Args:
        x: bf16 [m, k].
        gate: a prepared weight [h, k], or [e, h, k] with `group`.
        up: as `gate`.
        down: a prepared weight [n, h], or [e, n, h] with `group`.
        weight: fp32 [m], routing weights of the rows; none for a shared expert.
        group: which expert.

    Returns:
        bf16 [m, n].

    Raises:
        PrepError: a weight is not prepared.
    """
    if expert_supported(x, gate, up, down):
        return _launched(x, (gate, up, down), weight, group)
    hidden = norm.swiglu(gemm.linear_qdq(x, gate, group), gemm.linear_qdq(x, up, group), weight)
    return gemm.linear_qdq(hidden, down, group)


def expert_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    flag: torch.Tensor,
    weight: torch.Tensor | None = None,
    group: int | None = None,
) -> torch.Tensor:
    """`expert` where flag (int32 [1, 1]) is 1, zeros where it is not; the kernel of fp4 weights then reads none.

    Raises:
        PrepError: a weight is not prepared.
    """
    if expert_supported(x, gate, up, down) and _codes_per_byte(gate, x.shape[1]) == _FP4_PER_BYTE:
        return _launched(x, (gate, up, down), weight, group, flag)
    y = expert(x, gate, up, down, weight, group)
    return torch.where(flag == 1, y, torch.zeros_like(y))


def _codes_per_byte(w: torch.Tensor, k: int) -> float:
    """Of a prepared weight of k columns: 1 if its codes are e4m3, 2 if they are fp4."""
    columns: int = getattr(w, KERNEL_WEIGHT).shape[-1]
    return k / columns


def _launched(
    x: torch.Tensor,
    weights: tuple[torch.Tensor, ...],
    weight: torch.Tensor | None,
    group: int | None,
    *flag: torch.Tensor,
) -> torch.Tensor:
    """One launch for as many rows as a kernel takes; the gated kernel where there is a flag."""
    operands = []
    for w in weights:
        pair = getattr(w, KERNEL_WEIGHT), getattr(w, KERNEL_SCALE)
        operands += [one if group is None else one[group] for one in pair]
    factors = x.new_ones(x.shape[0], dtype=torch.float32) if weight is None else weight.float()
    order = "_kmajor" if hasattr(weights[0], KERNEL_ORDER) else ""
    element = "fp4" if _codes_per_byte(weights[0], x.shape[1]) == _FP4_PER_BYTE else "fp8"
    launch = kernel_launch.kernel(f"{element}_expert{order}{'_gated' if flag else ''}")
    rows = zip(torch.split(x, M_MAX), torch.split(factors.unsqueeze(-1), M_MAX), strict=True)
    return torch.cat([launch(part.contiguous(), *operands, some.contiguous(), *flag) for part, some in rows])
