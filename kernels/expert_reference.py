"""Torch references of an expert's kernels."""

from torch import Tensor

from .norm_reference import swiglu_weighted
from .reference import fp4_linear, fp8_linear


def fp4_expert(
    x: Tensor,
    gate: Tensor,
    gate_scale: Tensor,
    up: Tensor,
    up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    weight: Tensor,
) -> Tensor:
    """fp4_linear(swiglu(fp4_linear(x, gate), fp4_linear(x, up)) * weight, down).

    Args:
        x: bf16 [m, k].
        gate: uint8 [h, k / 2], two e2m1 codes a byte.
        gate_scale: uint8 [h, k / 32], e8m0.
        up: uint8 [h, k / 2].
        up_scale: uint8 [h, k / 32].
        down: uint8 [n, h / 2].
        down_scale: uint8 [n, h / 32].
        weight: fp32 [m, 1], each row's routing weight.

    Returns:
        bf16 [m, n].
    """
    hidden = swiglu_weighted(fp4_linear(x, gate, gate_scale), fp4_linear(x, up, up_scale), weight.flatten())
    return fp4_linear(hidden, down, down_scale)


def fp4_expert_gated(
    x: Tensor,
    gate: Tensor,
    gate_scale: Tensor,
    up: Tensor,
    up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    weight: Tensor,
    flag: Tensor,
) -> Tensor:
    """`fp4_expert` where flag int32 [1, 1] is 1, zeros where it is not."""
    y = fp4_expert(x, gate, gate_scale, up, up_scale, down, down_scale, weight)
    return y.where(flag == 1, 0.0).to(y.dtype)


def fp8_expert(
    x: Tensor,
    gate: Tensor,
    gate_scale: Tensor,
    up: Tensor,
    up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    weight: Tensor,
) -> Tensor:
    """fp8_linear(swiglu(fp8_linear(x, gate), fp8_linear(x, up)) * weight, down).

    Args: as those of `fp4_expert`, but for gate and up uint8 [h, k] and down uint8 [n, h], one e4m3 code a byte, and
    their scales uint8 [h / 32, k / 32] and [n / 32, h / 32].

    Returns:
        bf16 [m, n].
    """
    hidden = swiglu_weighted(fp8_linear(x, gate, gate_scale), fp8_linear(x, up, up_scale), weight.flatten())
    return fp8_linear(hidden, down, down_scale)
