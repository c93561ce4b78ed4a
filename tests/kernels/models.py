"""The kernels on DeepSeek-V4.1's shapes through the cost model, for the tests and scripts/kernel_cost.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nki_emulator import Options, TensorSpec, installed, run
from nki_emulator.cost import PESSIMISTIC, KernelCost, hbm_floor, kernel_cost

from tests.kernels.cases import Gemm

with installed():
    from deepinfer_prep.kernels import hc_attn_out, hc_collapse, hc_expand, hc_mixes

V41_FP8 = {
    "wq_a": (1280, 5120),
    "wq_b": (32768, 1280),
    "wkv": (512, 5120),
    "wo_a": (8192, 4096),
    "wo_b": (5120, 8192),
    "shared w1, w3": (2304, 5120),
    "shared w2": (5120, 2304),
}
"""DeepSeek-V4.1's fp8 weights: (n, k)."""

V41_FP4 = {"routed w1, w3": (2304, 5120), "routed w2": (5120, 2304)}
"""Its fp4 experts."""

ROWS = (1, 4, 16, 32, 128)
HIDDEN = 5120
STREAMS = 4
LOGITS = 24


@dataclass(frozen=True)
class Modelled:
    """A kernel's modelled time beside the least that its memory traffic takes."""

    cost: KernelCost
    """By the published figures at their best."""
    pessimistic: KernelCost
    """By what they leave open at its worst."""
    floor: float
    """Seconds."""

    @property
    def ratio(self) -> float:
        return self.cost.bound / self.floor

    @property
    def pessimistic_ratio(self) -> float:
        return self.pessimistic.bound / self.floor

    def cell(self) -> str:
        """Microseconds, ratio to the floor, and what sets the bound, at best and pessimistically."""
        columns = (self.cost, self.ratio), (self.pessimistic, self.pessimistic_ratio)
        return " / ".join(f"{cost.bound * 1e6:.1f} ({ratio:.2f}x, {cost.bound_by})" for cost, ratio in columns)


def gemm_model(gemm: Gemm, m: int, n: int, k: int, cores: int = 2) -> Modelled:
    """One GEMM kernel. The floor is the time to read its weights once from HBM, without scales."""
    rows, columns = gemm.scale_block
    dtype = "uint8" if gemm.scale_bytes else "float32"
    weights = TensorSpec((n, k // gemm.codes_per_byte), "uint8")
    scale = TensorSpec((-(-n // rows), k // columns), dtype)
    arguments = [TensorSpec((m, k), "bfloat16"), weights, scale]
    return kernel_model(gemm.kernel(cores), arguments, n * k // gemm.codes_per_byte, cores)


def hyper_connection_models(tokens: int, cores: int = 2) -> dict[str, Modelled]:
    """The hyper-connection kernels. The floor is the time to move what each reads and writes once."""
    bf16, fp32 = "bfloat16", "float32"
    hidden, trunk = (tokens, HIDDEN), (tokens, STREAMS, HIDDEN)
    gate, comb, fn = (tokens, STREAMS), (tokens, STREAMS, STREAMS), (LOGITS, STREAMS * HIDDEN)
    small = [(fn, bf16), (fn, bf16), ((3,), fp32), ((LOGITS,), fp32)]
    calls: dict[str, tuple[Any, list[tuple[tuple[int, ...], str]], int]] = {
        "hc_expand": (hc_expand.kernel, [(hidden, bf16)], 5),
        "hc_collapse": (hc_collapse.kernel, [(trunk, bf16), (gate, fp32)], 5),
        "hc_attn_out": (hc_attn_out.kernel, [(hidden, bf16), (trunk, bf16), (gate, fp32), (comb, fp32)], 9),
        "hc_mixes": (hc_mixes.kernel, [(trunk, bf16), *small], 4),
    }
    result = {}
    for name, (kernel, specs, rows_moved) in calls.items():
        size = 2 * rows_moved * tokens * HIDDEN + (2 * 2 * LOGITS * STREAMS * HIDDEN if name == "hc_mixes" else 0)
        arguments = [TensorSpec(shape, dtype) for shape, dtype in specs]
        result[name] = kernel_model(kernel, arguments, size, cores)
    return result


def kernel_model(kernel: Any, arguments: Sequence[TensorSpec | float], size: int, cores: int) -> Modelled:
    """Any kernel. The floor is the time to move `size` bytes once."""
    options = Options(arithmetic=False)
    instructions = run(kernel, *arguments, grid=cores, options=options).instructions
    assert instructions is not None, "the simulator keeps no record: uninstall AWS's nki to model costs"
    return Modelled(kernel_cost(instructions), kernel_cost(instructions, PESSIMISTIC), hbm_floor(size, cores))
