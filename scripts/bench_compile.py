"""What the torch.compile backend costs: against aot_eager, and against graph size; operations a cast.

    python scripts/bench_compile.py [--layers 16] [--rounds 5] [--sizes 100,300,1000,3000,10000]

Layers that quantize their activations (quantized_layers.py) are compiled by aot_eager, which keeps every cast as one
operation, and by deepinfer_neuron over aot_eager. Each run is a process of its own, which has compiled something
small before, so that imports do not count; the two take turns. What counts is the first call less the second.

Graphs are made of repeated blocks of the kind that decoding has: one fp8 weight decoded, one activation
encoded, an fp8 cache written and read, the rest moves and float arithmetic. Each size is one graph; the pass
turns Dynamo's graph into bytes, AOT traces the result. No device and no torch-neuronx are needed. Times are CPU
seconds of one thread on this machine; what they show is how they grow.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from quantized_layers import Layers, step_arguments
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from deepinfer_prep.runtime.backend import codecs, deepinfer_neuron, leftover_check

F8 = torch.float8_e4m3fn
BLOCK_NODES = 20
"""Nodes of Dynamo's graph that one block makes."""


@dataclass
class Timing:
    """One graph. CPU seconds; nodes before the pass, after it, and after AOT."""

    dynamo_nodes: int = 0
    bytes_nodes: int = 0
    aot_nodes: int = 0
    total: float = 0.0
    aot: float = 0.0
    check: float = 0.0

    @property
    def passes(self) -> float:
        return self.total - self.aot


def decode_blocks(x: Tensor, weight: Tensor, cache: Tensor, count: int) -> Tensor:
    """`count` blocks of decoding; x [8, 32] float32, weight [32, 32] and cache [8, 64] fp8."""
    for _ in range(count):
        codes = (x * 0.5).to(F8)
        both = torch.cat([codes, codes], -1)
        cache[2:4] = both[2:4]
        rows = cache.view(8, 2, 32)[:, 1].reshape(-1).view(8, 32)
        picked = torch.stack([rows, codes]).flip(0)[0].t().contiguous().t()
        dequantized = weight.unsqueeze(0).squeeze(0).float()
        x = torch.tanh(x @ dequantized * 0.01 + x) + picked.shape[0] * 0.125
    return x


def measure(nodes: int) -> Timing:
    """Compile one graph of about `nodes` nodes with everything timed."""
    timing = Timing()
    torch._dynamo.reset()
    x, weight = torch.randn(8, 32), torch.randn(32, 32).to(F8)
    cache = torch.zeros(8, 64).to(F8)
    backend = timed_backend(timing)
    with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=100):
        torch.compile(decode_blocks, backend=backend, dynamic=False)(x, weight, cache, max(1, nodes // BLOCK_NODES))
    return timing


def timed_backend(timing: Timing) -> Callable[..., Any]:
    """The backend over an AOT that compiles nothing, with the time of each noted in `timing`."""

    def forward(graph: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        timing.aot_nodes = len(graph.graph.nodes)
        return graph.forward

    def base(graph: GraphModule, examples: list[Any]) -> Any:
        timing.bytes_nodes = len(graph.graph.nodes)
        start = time.process_time()
        compiled = aot_autograd(fw_compiler=forward, keep_inference_input_mutations=True)(graph, examples)
        timing.aot = time.process_time() - start
        start = time.process_time()
        leftover_check.check(graph)
        timing.check = time.process_time() - start
        return compiled

    def backend(graph: GraphModule, examples: list[Any]) -> Any:
        timing.dynamo_nodes = len(graph.graph.nodes)
        start = time.process_time()
        compiled = deepinfer_neuron(graph, examples, options={"base_backend": base})
        timing.total = time.process_time() - start - timing.check
        return compiled

    return backend


def count_operations(codec: Callable[[Tensor], Tensor], example: Tensor) -> int:
    """aten operations of a codec; a view of another type is followed by a detach, which is none."""
    graph = make_fx(codec, tracing_mode="fake")(example).graph
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return sum("detach" not in target for target in targets)


def print_operations() -> None:
    codes = torch.zeros(4, dtype=torch.uint8)
    print("aten operations a cast")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        values = torch.zeros(4, dtype=dtype)
        decode = count_operations(partial(codecs.decode_e4m3fn, dtype=dtype), codes)
        scales = count_operations(partial(codecs.decode_e8m0, dtype=dtype), codes)
        print(
            f"  {name:9} decode e4m3fn {decode:3}  encode e4m3fn {count_operations(codecs.encode_e4m3fn, values):3}"
            f"  decode e8m0 {scales:3}  encode e8m0 {count_operations(codecs.encode_e8m0, values):3}"
        )


COMPILERS: dict[str, dict[str, Any]] = {
    "aot_eager": {"backend": "aot_eager"},
    "deepinfer_neuron": {"backend": "deepinfer_neuron", "options": {"base_backend": "aot_eager"}},
}


def compile_layers(compiler: str, count: int) -> float:
    """CPU seconds that compiling `count` layers takes."""
    torch.manual_seed(0)
    keywords = COMPILERS[compiler]
    with torch.no_grad():
        torch.compile(lambda x: x.to(F8).float() * 2, dynamic=False, **keywords)(torch.ones(3))
        run = torch.compile(Layers(count), fullgraph=True, dynamic=False, **keywords)
        start = time.process_time()
        run(*step_arguments())
        compiled = time.process_time()
        run(*step_arguments())
        return compiled - start - (time.process_time() - compiled)


def print_ratio(layers: int, rounds: int) -> None:
    """Compile in turns, each time in a process of its own."""
    seconds: dict[str, list[float]] = {compiler: [] for compiler in COMPILERS}
    for _ in range(rounds):
        for compiler, runs in seconds.items():
            command = [sys.executable, __file__, "--layers", str(layers), "--compiler", compiler]
            runs.append(float(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    ratios = [ours / theirs for theirs, ours in zip(*seconds.values(), strict=True)]
    print(f"compiling {layers} layers of seven quantized products each, {rounds} rounds, CPU seconds")
    for compiler, runs in seconds.items():
        print(f"  {compiler:17} median {statistics.median(runs):6.2f}  ({min(runs):.2f} to {max(runs):.2f})")
    print(f"  ratio             median {statistics.median(ratios):6.2f}  ({min(ratios):.2f} to {max(ratios):.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="100,300,1000,3000,10000", help="graph nodes, separated by commas")
    parser.add_argument("--layers", type=int, default=16, help="layers that both backends compile")
    parser.add_argument("--rounds", type=int, default=5, help="how often each compiles them; 0 leaves it out")
    parser.add_argument("--compiler", choices=COMPILERS, help="compile the layers once and print the seconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.compiler:
        print(compile_layers(options.compiler, options.layers))
        return
    print(f"torch {torch.__version__}")
    print_operations()
    if options.rounds:
        print_ratio(options.layers, options.rounds)
    if options.sizes:
        print_growth([int(size) for size in options.sizes.split(",")])


def print_growth(sizes: list[int]) -> None:
    """Times of the pass and of AOT for graphs of several sizes."""
    measure(sizes[0])  # imports and caches
    print("  nodes   after     AOT   pass s  us/node  check s    AOT s  us/node")
    for size in sizes:
        timing = measure(size)
        print(
            f"{timing.dynamo_nodes:7} {timing.bytes_nodes:7} {timing.aot_nodes:7} {timing.passes:8.3f} "
            f"{timing.passes / timing.dynamo_nodes * 1e6:8.0f} {timing.check:8.3f} {timing.aot:8.2f} "
            f"{timing.aot / timing.aot_nodes * 1e6:8.0f}"
        )


if __name__ == "__main__":
    main()
