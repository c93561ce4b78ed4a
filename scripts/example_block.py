"""Serve a prepared checkpoint on a CPU: miniature DeepSeek-V4.1 layers of every kind, run in several ways and compared.

    python scripts/example_block.py

Layers are filled twice: from the converted sample, built on meta and filled by `load_weights`; and live, from the
unprepared sample, repaired in memory as for checkpoints that were not prepared. Both have to agree bit for bit.

The tokens go through each layer in four ways: all at once; in chunks that split groups of the compressor; one by one;
and as drafts, five a step of which two are rejected and come again. In fp32, without rounding of activations and
caches, the ways agree to 1e-4, and so does float64 from the sample's own, dequantized values. As served (bf16, fp8 and
fp4), steps differ from float64 with the same roundings where sums land on two sides of a rounding.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from example_arithmetic import SERVED, Arithmetic, Wide
from example_attention import DRAFTS, Caches, Choice, new_caches
from example_dims import STREAMS, BlockDims
from example_model import Block, rename
from example_reference import AS_SERVED, EXACT, ReferenceBlock, Rounding, Source
from make_checkpoint import SampleOptions, write_checkpoint
from safetensors.torch import load_file
from torch import Tensor

from deepinfer_prep.convert import convert_checkpoint
from deepinfer_prep.runtime import LoadReport, Target, gemm, load_weights, mhc, rescale_fp8_weights

SAMPLE = SampleOptions(hidden=640, layers=10, experts=4)
LAYERS = {
    0: "window only",
    2: "ratio 2, makes entries and chooses",
    3: "ratio 2, follows layer 2",
    5: "ratio 1, makes entries, chooses and names candidates",
    6: "ratio 1, chooses among candidates",
}
"""Layers of the sample that are run, one of each kind."""

TOKENS = tuple((37 * place * place + 101 * place + 3) % 1999 for place in range(30))
CHUNKS = (7, 6, 1, 3, 13)
WAYS: dict[str, tuple[tuple[int, int], ...]] = {
    "whole": ((len(TOKENS), 0),),
    "chunks": tuple((size, 0) for size in CHUNKS),
    "tokens": ((1, 0),) * len(TOKENS),
    "drafts": ((DRAFTS - 2, 2),) * (len(TOKENS) // (DRAFTS - 2)),
}
"""The steps of each way: how many tokens are kept, and how many are rejected behind them."""

WAYS_TOLERANCE = 1e-4
"""Largest difference between two ways in fp32."""
EXACT_TOLERANCE = 2e-4
"""Largest relative difference (in norm, over the streams of a token) of fp32 from float64, both without rounding."""
SERVED_TOLERANCE = 0.15
TYPICAL_TOLERANCE = 0.005
"""The same of what is served from float64 with the same roundings: of the worst token, and of the median of a layer.

A bf16 rounding that falls the other way can move an activation by a whole fp8 or fp4 step, and experts, which round
their input to fp8 as well, enlarge it. Most tokens of a layer have none that matters.
"""

Outputs = dict[int, Tensor]
"""The streams that leave each layer, [t, 4, h]."""


@dataclass(frozen=True)
class Agreement:
    """How far the ways are apart, at worst over all layers and tokens."""

    live_is_equal: bool
    """Whether prepared and live give the same bits."""
    between_ways: float
    from_exact: float
    from_served: float
    typically: float

    @property
    def holds(self) -> bool:
        """Whether all of it is as it should be."""
        near = self.between_ways <= WAYS_TOLERANCE and self.from_exact <= EXACT_TOLERANCE
        served = self.from_served <= SERVED_TOLERANCE and self.typically <= TYPICAL_TOLERANCE
        return self.live_is_equal and near and served

    def __str__(self) -> str:
        return (
            f"prepared and live {'agree bit for bit' if self.live_is_equal else 'DIFFER'}; in fp32 ways of running "
            f"differ by at most {self.between_ways:.1e} (allowed {WAYS_TOLERANCE}), and from float64 by "
            f"{self.from_exact:.1e} (allowed {EXACT_TOLERANCE}); as served, from float64 with the same roundings by "
            f"{self.typically:.4f} in the middle (allowed {TYPICAL_TOLERANCE}) and {self.from_served:.3f} at most "
            f"(allowed {SERVED_TOLERANCE})"
        )


def read_source(folder: Path) -> dict[str, Tensor]:
    """Every tensor of an unprepared checkpoint."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def dims_of(folder: Path, layer: int) -> BlockDims:
    """The sizes and kind of a layer, from config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["text_config"]
    return BlockDims.of_config(config, layer)


def prepared_block(output: Path, layer: int, arithmetic: Arithmetic = SERVED) -> tuple[Block, LoadReport]:
    """Built without memory, filled from a prepared checkpoint: all that serving code has to do."""
    with torch.device("meta"):
        block = Block(dims_of(output, layer), arithmetic)
    report = load_weights(block, output, rename=partial(rename, f"layers.{layer}."))
    return block, report


def live_block(source: Path, layer: int, arithmetic: Arithmetic = SERVED) -> Block:
    """Filled from an unprepared checkpoint and repaired in memory."""
    block, tensors = Block(dims_of(source, layer), arithmetic), read_source(source)
    parts: dict[str, dict[tuple[int, int], str]] = {}
    for name in tensors:
        target = rename(f"layers.{layer}.", name)
        if target is not None:
            target = Target(target) if isinstance(target, str) else target
            parts.setdefault(target.parameter, {})[target.expert or 0, target.part] = name
    for parameter, names in parts.items():
        _fill(block.get_parameter(parameter), [names[place] for place in sorted(names)], tensors)
    rescale_fp8_weights(block)
    gemm.prepare_model(block)
    mhc.prepare_model(block)
    return block


def _fill(parameter: torch.nn.Parameter, names: list[str], tensors: dict[str, Tensor]) -> None:
    parameter.copy_(torch.cat([tensors[name] for name in names]).view(parameter.shape))
    scales = [name.removesuffix("weight") + "scale" for name in names]
    if scales[0] in tensors:
        stacked = torch.cat([tensors[name] for name in scales])
        shape = (*parameter.shape[:-2], -1, stacked.shape[-1])
        parameter.sf = stacked.view(shape)  # type: ignore[attr-defined]


def streams_of_tokens(source: Path, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The residual streams that enter every layer, [t, 4, h]."""
    return mhc.expand(read_source(source)["embed.weight"][list(TOKENS)].to(dtype), STREAMS)


def caches_of(blocks: Mapping[int, Block]) -> dict[int, Caches]:
    """New caches of all layers; layers behind a source share what it makes."""
    caches: dict[int, Caches] = {}
    for layer, block in blocks.items():
        dims = block.attn.dims
        caches[layer] = new_caches(dims, len(TOKENS) + DRAFTS, block.attn.arithmetic.dtype, caches.get(dims.kv_source))
    return caches


def run_blocks(blocks: Mapping[int, Block], streams: Tensor, way: Sequence[tuple[int, int]]) -> Outputs:
    """Take the tokens through each layer in the steps of a way; every layer gets the same streams [t, 4, h]."""
    caches = caches_of(blocks)
    outputs: dict[int, list[Tensor]] = {layer: [] for layer in blocks}
    for first, kept, residual in _steps(streams, way):
        positions = torch.arange(first, first + residual.shape[0], dtype=torch.int32)
        choice: Choice | None = None
        for layer, block in blocks.items():
            found, choice = block(residual, caches[layer], positions, choice)
            outputs[layer].append(found[:kept])
    return {layer: torch.cat(found) for layer, found in outputs.items()}


def _steps(streams: Tensor, way: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, Tensor]]:
    """Each step's first position, how many of its tokens are kept, and its streams; drafts to reject are made up."""
    first = 0
    for kept, rejected in way:
        yield first, kept, torch.cat([streams[first : first + kept], streams.flip(0)[first : first + rejected]])
        first += kept


def run_reference(source: Path, rounding: Rounding) -> Outputs:
    """The same in float64."""
    tensors, streams = read_source(source), streams_of_tokens(source).double()
    sources = {layer: Source() for layer in LAYERS}
    outputs = {}
    blocks = {}
    for layer in LAYERS:
        prefix = f"layers.{layer}."
        own = {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
        blocks[layer] = ReferenceBlock(dims_of(source, layer), own, rounding, sources)
        outputs[layer] = torch.empty_like(streams)
    for place, residual in enumerate(streams):
        for layer, block in blocks.items():
            outputs[layer][place] = block.step(residual)
    return outputs


def distances(found: Outputs, expected: Outputs) -> Tensor:
    """The relative difference of every token in every layer, in norm: [layers, t]."""
    pairs = [(found[layer].double().flatten(1), expected[layer].double().flatten(1)) for layer in expected]
    return torch.stack([(one - other).norm(dim=1) / other.norm(dim=1) for one, other in pairs])


def between_ways(blocks: Mapping[int, Block], streams: Tensor) -> tuple[Outputs, float]:
    """What the first way gives, and the largest difference of another way from it."""
    outputs = [run_blocks(blocks, streams, way) for way in WAYS.values()]
    whole = outputs[0]
    return whole, max(float((one[layer] - whole[layer]).abs().max()) for one in outputs[1:] for layer in whole)


def compare(source: Path, output: Path) -> Agreement:
    """Set the ways of filling and running the layers against one another and against float64."""
    served = {layer: prepared_block(output, layer)[0] for layer in LAYERS}
    live = {layer: live_block(source, layer) for layer in LAYERS}
    arithmetic = Wide()
    wide = {layer: prepared_block(output, layer, arithmetic)[0] for layer in LAYERS}
    prepared, repaired = (run_blocks(one, streams_of_tokens(source), WAYS["chunks"]) for one in (served, live))
    whole, apart = between_ways(wide, streams_of_tokens(source, torch.float32))
    from_served = distances(prepared, run_reference(source, AS_SERVED))
    return Agreement(
        live_is_equal=all(torch.equal(prepared[layer], repaired[layer]) for layer in LAYERS),
        between_ways=apart,
        from_exact=float(distances(whole, run_reference(source, EXACT)).max()),
        from_served=float(from_served.max()),
        typically=float(from_served.median(dim=1).values.max()),
    )


@click.command()
def main() -> None:
    """Convert a sample checkpoint, run layers of every kind in several ways, and state the agreement."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "source"), Path(folder, "output")
        sample = write_checkpoint(source, SAMPLE)
        click.echo(f"sample: {sample.total_bytes:,} bytes, {len(TOKENS)} tokens")
        convert_checkpoint(source, output)
        for layer, kind in LAYERS.items():
            click.echo(f"layer {layer}, {kind}: {prepared_block(output, layer)[1]}")
        agreement = compare(source, output)
    click.echo(f"{agreement}.")
    if not agreement.holds:
        raise click.ClickException("the layers do not compute what their checkpoint says")


if __name__ == "__main__":
    main()
