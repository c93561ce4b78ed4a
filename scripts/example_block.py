"""Serve a prepared checkpoint on a CPU: a miniature DeepSeek-V4.1 block, loaded three ways and compared.

    python scripts/example_block.py

1. prepared: the sample is converted, the block is built on meta and filled by `load_weights`;
2. live: the block is filled from the unprepared sample and repaired in memory, as for checkpoints that were not
   prepared;
3. reference: the same steps in float64 from the sample's own, dequantized values, once with activations rounded
   where the block rounds them, and once without any rounding.

1 and 2 have to agree bit for bit. The first reference differs only where sums in fp32 and float64 land on two
sides of a rounding; the second one shows what activations in fp8 and bf16 cost, whatever the weights' format.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import torch
from example_model import STREAMS, Block, BlockDims, rename
from example_reference import AS_SERVED, EXACT, ReferenceBlock, Rounding
from make_checkpoint import SampleOptions, write_checkpoint
from safetensors.torch import load_file
from torch import Tensor

from deepinfer_prep.convert import convert_checkpoint
from deepinfer_prep.runtime import LoadReport, Target, gemm, load_weights, mhc, rescale_fp8_weights

PREFIX = "layers.0."
SAMPLE = SampleOptions(hidden=640, layers=4, experts=8)
TOKENS = (3, 141, 59, 26, 535, 89, 79, 323)

SERVED_TOLERANCE = 0.04
"""Largest relative difference (in norm, over the streams of a step) from float64 with the block's roundings.

A bf16 rounding that falls the other way can move an activation by a whole fp8 step, and experts, which round their
input to fp8 as well, enlarge it; steps without such a flip agree to 0.001.
"""
EXACT_TOLERANCE = 0.15
"""The same from float64 without any rounding: e4m3 has four significant bits."""


@dataclass(frozen=True)
class Agreement:
    """How far the ways are apart, at worst over all steps."""

    live_is_equal: bool
    """Whether prepared and live give the same bits."""
    from_served: float
    from_exact: float

    @property
    def holds(self) -> bool:
        """Whether all of it is as it should be."""
        near = self.from_served <= SERVED_TOLERANCE and self.from_exact <= EXACT_TOLERANCE
        return self.live_is_equal and near

    def __str__(self) -> str:
        return (
            f"prepared and live {'agree bit for bit' if self.live_is_equal else 'DIFFER'}; from float64 with the same "
            f"roundings at most {self.from_served:.4f} (allowed {SERVED_TOLERANCE}), from float64 without rounding "
            f"at most {self.from_exact:.3f} (allowed {EXACT_TOLERANCE})"
        )


def read_source(folder: Path) -> dict[str, Tensor]:
    """Every tensor of an unprepared checkpoint."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def dims_of(folder: Path) -> BlockDims:
    """The block's sizes from config.json."""
    return BlockDims.of_config(_text_config(folder))


def _text_config(folder: Path) -> dict[str, int]:
    config: dict[str, int] = json.loads((folder / "config.json").read_text())["text_config"]
    return config


def prepared_block(output: Path) -> tuple[Block, LoadReport]:
    """Built without memory, filled from a prepared checkpoint: all that serving code has to do."""
    with torch.device("meta"):
        block = Block(dims_of(output))
    report = load_weights(block, output, rename=partial(rename, PREFIX))
    return block, report


def live_block(source: Path) -> Block:
    """Filled from an unprepared checkpoint and repaired in memory."""
    block, tensors = Block(dims_of(source)), read_source(source)
    parts: dict[str, dict[tuple[int, int], str]] = {}
    for name in tensors:
        target = rename(PREFIX, name)
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


def streams_of_tokens(source: Path) -> Iterator[Tensor]:
    """The residual streams that enter the block, bf16 [1, 4, h] for each token."""
    embeddings = read_source(source)["embed.weight"]
    for token in TOKENS:
        yield mhc.expand(embeddings[token : token + 1], STREAMS)


def run_block(block: Block, source: Path) -> list[Tensor]:
    """Step through the tokens: the streams that leave the block, bf16 [1, 4, h] for each."""
    cache = torch.zeros(len(TOKENS), dims_of(source).head_dim, dtype=torch.bfloat16)
    steps = enumerate(streams_of_tokens(source))
    return [block(streams, cache, torch.tensor([position])) for position, streams in steps]


def run_reference(source: Path, rounding: Rounding) -> list[Tensor]:
    """The same steps in float64: [4, h] for each token."""
    tensors = {name.removeprefix(PREFIX): one for name, one in read_source(source).items() if name.startswith(PREFIX)}
    block = ReferenceBlock(dims_of(source), tensors, rounding)
    return [block.step(streams[0].double()) for streams in streams_of_tokens(source)]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative difference of a step, in norm."""
    pairs = zip(found, expected, strict=True)
    return max(float((one.double().reshape(other.shape) - other).norm() / other.norm()) for one, other in pairs)


def compare(prepared: list[Tensor], live: list[Tensor], source: Path) -> Agreement:
    """Set the steps of the two blocks against each other and against both references."""
    return Agreement(
        live_is_equal=all(torch.equal(one, other) for one, other in zip(prepared, live, strict=True)),
        from_served=distance(prepared, run_reference(source, AS_SERVED)),
        from_exact=distance(prepared, run_reference(source, EXACT)),
    )


@click.command()
def main() -> None:
    """Convert a sample checkpoint, run one of its blocks prepared, live and in float64, and state the agreement."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "source"), Path(folder, "output")
        sample = write_checkpoint(source, SAMPLE)
        click.echo(f"sample: {sample.total_bytes:,} bytes, {dims_of(source)}")
        convert_checkpoint(source, output)
        block, report = prepared_block(output)
        click.echo(f"prepared: {report}")
        prepared = run_block(block, source)
        live = run_block(live_block(source), source)
        agreement = compare(prepared, live, source)
    for token, streams in zip(TOKENS, prepared, strict=True):
        click.echo(f"token {token:>4}: streams of norm {', '.join(f'{norm:.3f}' for norm in streams[0].norm(dim=-1))}")
    click.echo(f"{agreement}.")
    if not agreement.holds:
        raise click.ClickException("the block does not compute what its checkpoint says")


if __name__ == "__main__":
    main()
