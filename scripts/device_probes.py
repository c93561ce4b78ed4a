"""Probes for the first hour on a device: a tiny kernel for each form that no public kernel shows, with its verdict.

    python scripts/device_probes.py             # on AWS's simulator where `nki` is installed, else on the emulator
    python scripts/device_probes.py --device    # on a Neuron device, with the time of a call, and rates

Each probe compares what comes out with what the form should give. A probe that fails or is refused says what to do
instead; docs/kernels.md, docs/attention.md and docs/index_and_pool.md say which kernels it concerns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import click
import torch

sys.path.extend(str(Path(__file__).resolve().parents[1] / part) for part in ("", "tests", "scripts"))
from nki_emulator import run
from probe_kernels.attention import attention_probes, attention_rates
from probe_kernels.forms import Probe, RateProbe
from probe_kernels.gemm import gemm_probes
from probe_kernels.index_and_pool import index_and_pool_probes
from probe_kernels.norm_and_streams import norm_and_stream_probes

CALLS = 20
"""Calls that a time is taken over."""

TOP_K = 512
TOP_K_ENTRIES = (4096, 16384, 65536, 131072)

Outcome: TypeAlias = tuple[torch.Tensor, float | None]
"""What a kernel returned, and the mean seconds of a call where they were taken."""
Execute: TypeAlias = Callable[[Probe], Outcome]


def probes() -> tuple[Probe, ...]:
    """All probes that are right or wrong wherever they run."""
    return (*gemm_probes(), *attention_probes(), *index_and_pool_probes(), *norm_and_stream_probes())


def rates() -> tuple[RateProbe, ...]:
    """All probes of times."""
    return attention_rates()


def _on_host(probe: Probe) -> Outcome:
    output = run(probe.kernel, *probe.arguments, grid=probe.grid if probe.grid > 1 else None).output
    return output if isinstance(output, torch.Tensor) else torch.from_numpy(output), None


def _on_device(probe: Probe) -> Outcome:
    """On the Neuron device, with the mean time of a call: mostly the launch, so compare probes with each other."""
    from deepinfer_prep.runtime import neuron

    call = neuron.wrap_nki()(probe.kernel)[(probe.grid,)]
    placed = [argument.to("neuron") if isinstance(argument, torch.Tensor) else argument for argument in probe.arguments]
    output = call(*placed).cpu()
    return output, _mean_seconds(lambda: call(*placed))


def _mean_seconds(call: Callable[[], torch.Tensor]) -> float:
    started = time.perf_counter()
    for _ in range(CALLS):
        last = call()
    last.cpu()
    return (time.perf_counter() - started) / CALLS


def verdict(probe: Probe, execute: Execute) -> tuple[bool, str]:
    """Whether the probe holds, and the line that says so."""
    name = probe.kernel.__name__
    try:
        found, seconds = execute(probe)
    except Exception as error:  # A compiler's refusal is a finding like any other.
        return False, f"REFUSED {name}: {_first_line(error)}. Instead: {probe.otherwise}"
    different = probe.differences(found)
    if different:
        return False, f"WRONG   {name}: {different} of {found.numel()} values differ. Instead: {probe.otherwise}"
    return True, f"holds   {name}" + ("" if seconds is None else f" {seconds * 1e6:.0f} us a call")


def rate_verdict(probe: RateProbe, execute: Execute) -> tuple[bool, str]:
    """Whether one more takes no longer than it may, and the line that says so; without times, only results count."""
    seconds = []
    for part in (probe.less, probe.more):
        good, line = verdict(part, execute)
        if not good:
            return False, line
        seconds.append(execute(part)[1])
    before, after = seconds
    if before is None or after is None:
        return True, f"holds   {probe.what} (right; its time is a device's to say)"
    each = (after - before) / probe.extra
    figures = f"{each * 1e6:.2f} us each, at most {probe.limit * 1e6:.2f}"
    if each > probe.limit:
        return False, f"SLOW    {probe.what}: {figures}. Instead: {probe.otherwise}"
    return True, f"holds   {probe.what}: {figures}"


def top_k_lines() -> list[str]:
    """What torch.topk takes on the device, for the decision in docs/index_and_pool.md: figures, no verdict."""
    lines = []
    for entries in TOP_K_ENTRIES:
        scores = torch.randn((1, entries)).to("neuron")
        seconds = _mean_seconds(lambda scores=scores: torch.topk(scores, TOP_K).indices)  # type: ignore[misc]
        lines.append(f"time    torch.topk of {TOP_K} of {entries}: {seconds * 1e6:.0f} us a call")
    return lines


def _first_line(error: Exception) -> str:
    lines: Sequence[str] = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


@click.command()
@click.option("--device", is_flag=True, help="Run on the Neuron device and time the calls.")
def main(device: bool) -> None:
    """Print a verdict for each probe; the exit status is 1 if one fails."""
    execute = _on_device if device else _on_host
    outcomes = [verdict(probe, execute) for probe in probes()]
    outcomes += [rate_verdict(probe, execute) for probe in rates()]
    for _, line in outcomes:
        print(line)
    for line in top_k_lines() if device else []:
        print(line)
    sys.exit(0 if all(good for good, _ in outcomes) else 1)


if __name__ == "__main__":
    main()
