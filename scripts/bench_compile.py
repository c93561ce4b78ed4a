"""What the torch.compile backend costs: time of the pass and of AOT against graph size, operations a cast.

    python scripts/bench_compile.py [--sizes 100,300,1000,3000,10000]

Graphs are made of repeated blocks of the kind that decoding has: one fp8 weight decoded, one activation
encoded, an fp8 cache written and read, the rest moves and float arithmetic. Each size is one graph; the pass
turns Dynamo's graph into bytes, AOT traces the result. No device and no torch-neuronx are needed. Times are CPU
seconds of one thread on this machine; what they show is how they grow.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", default="100,300,1000,3000,10000", help="graph nodes, separated by commas")
    sizes = [int(size) for size in parser.parse_args().sizes.split(",")]
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}")
    print_operations()
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
