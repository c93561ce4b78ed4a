"""Whether fusing steps of a layer into one kernel pays, by the cost model and the latency of a kernel call.

A step that torch can do as well has a second price: inside a compiled graph it costs at least the time to move what it
reads and writes, and no call. A form that is not built is credited with its best case: the busy times of each
engine added up, perfect overlap, and nothing written and read again between the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nki_emulator.cost import ENGINES, HBM_BYTES_PER_SECOND, KernelCost, hbm_floor

from tests.kernels.cases import GEMMS
from tests.kernels.models import HIDDEN, V41_FP4, V41_FP8, Modelled, gemm_model, hyper_connection_models
from tests.kernels.small_models import INTER, LATENT, norm_model, pool_model, swiglu_model

CALL = (100e-6, 200e-6)
"""Seconds of a kernel call in a graph beyond its work, at best and at worst: reports of others, on trn1."""

CORES = 2


@dataclass(frozen=True)
class Step:
    """One step as a kernel, and how many bytes torch moves for it in a compiled graph; None where it needs a kernel."""

    kernel: Modelled
    moved: int | None


@dataclass(frozen=True)
class Fusion:
    """Steps that could be one kernel."""

    name: str
    steps: Callable[[int], list[Step]]
    """By the number of tokens."""
    between: Callable[[int], int]
    """Bytes that are written and read again between the steps when they are apart."""


@dataclass(frozen=True)
class Verdict:
    """Seconds at best and at worst: kernels for all steps, kernels where there is no other way, and one kernel."""

    kernels: tuple[float, float]
    mixed: tuple[float, float]
    fused: tuple[float, float]

    @property
    def saved(self) -> tuple[float, float]:
        """What fusing saves of the better of the other two."""
        ways = zip(self.kernels, self.mixed, self.fused, strict=True)
        best, worst = (min(kernels, mixed) - fused for kernels, mixed, fused in ways)
        return best, worst

    @property
    def pays(self) -> bool:
        """Whether it saves a tenth in both columns: less is within what the model cannot know."""
        others = zip(self.saved, self.kernels, self.mixed, strict=True)
        return all(saved >= 0.1 * min(kernels, mixed) for saved, kernels, mixed in others)


def _collapse(m: int) -> Step:
    return Step(hyper_connection_models(m, CORES)["hc_collapse"], 2 * m * 5 * HIDDEN)


def _norm(m: int, columns: int = HIDDEN) -> Step:
    return Step(norm_model(m, columns, CORES), 4 * m * columns)


def _gemm(name: str, weight: tuple[int, int]) -> Callable[[int], Step]:
    gemm = next(one for one in GEMMS if one.name == name)
    return lambda m: Step(gemm_model(gemm, m, *weight, CORES), None)


def _pooled(m: int) -> list[Step]:
    groups = max(1, m // 2)
    # Rope and the record: no kernel does them alone; the norm's stands in for their passes.
    rope = Step(norm_model(groups, LATENT, CORES), groups * (4 * LATENT + 288))
    return [Step(pool_model(groups, cores=CORES), groups * 18 * LATENT), _norm(groups, LATENT), rope]


_WQ_A = _gemm("fp8_linear", V41_FP8["wq_a"])
_UP, _DOWN = (_gemm("fp4_linear", V41_FP4[name]) for name in ("routed w1, w3", "routed w2"))


def _swiglu(m: int) -> Step:
    return Step(swiglu_model(m, INTER, CORES), 6 * m * INTER)


FUSIONS = (
    Fusion("norm, then round trip and GEMM (wq_a)", lambda m: [_norm(m), _WQ_A(m)], lambda m: 4 * m * HIDDEN),
    Fusion("hc_collapse, norm", lambda m: [_collapse(m), _norm(m)], lambda m: 4 * m * HIDDEN),
    Fusion(
        "hc_mixes, hc_collapse, norm",
        lambda m: [Step(hyper_connection_models(m, CORES)["hc_mixes"], None), _collapse(m), _norm(m)],
        lambda m: 4 * m * HIDDEN,
    ),
    Fusion("pool, norm, rope, store", _pooled, lambda m: m // 2 * 8 * LATENT),
    Fusion("swiglu, then round trip and GEMM (w2)", lambda m: [_swiglu(m), _DOWN(m)], lambda m: 4 * m * INTER),
    Fusion(
        "an expert: w1, w3, swiglu, w2",
        lambda m: [_UP(m), _UP(m), _swiglu(m), _DOWN(m)],
        lambda m: 12 * m * INTER,
    ),
)


def verdict(fusion: Fusion, m: int) -> Verdict:
    """The three ways for m tokens."""
    steps, between = fusion.steps(m), fusion.between(m)
    columns = [[_cost(step, column) for step in steps] for column in (0, 1)]
    kernels = [sum(cost.bound + call for cost in costs) for costs, call in zip(columns, CALL, strict=True)]
    mixed = [
        sum(cost.bound + call if step.moved is None else hbm_floor(step.moved, CORES) for step, cost in pairs)
        for pairs, call in ((zip(steps, costs, strict=True), call) for costs, call in zip(columns, CALL, strict=True))
    ]
    fused = [call + _together(costs, between) for costs, call in zip(columns, CALL, strict=True)]
    return Verdict(*((pair[0], pair[1]) for pair in (kernels, mixed, fused)))


def _cost(step: Step, column: int) -> KernelCost:
    return (step.kernel.cost, step.kernel.pessimistic)[column]


def _together(costs: list[KernelCost], between: int) -> float:
    """Seconds of the busiest engine when one kernel does all steps."""
    busy = {engine: sum(cost.slowest.seconds[engine] for cost in costs) for engine in ENGINES}
    busy["hbm"] -= between / CORES / HBM_BYTES_PER_SECOND
    return max(busy.values())
