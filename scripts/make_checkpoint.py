"""Write a DeepSeek-V4.1 checkpoint of any size: the released names, dtypes, scale shapes, config and index.

    python scripts/make_checkpoint.py OUT --size 8GB

Also a library: `write_checkpoint(folder, SampleOptions(...))`, and `source_values` for the numbers before quantization.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import click
from sample_checkpoint import fit as sizing
from sample_checkpoint.dims import ModelDims
from sample_checkpoint.extras import MARKER, extra_files
from sample_checkpoint.shards import Shard, index_text, plan_shards
from sample_checkpoint.table import Entry, Plain, Quantized, Tensor, entries, total_bytes
from sample_checkpoint.values import source_values
from sample_checkpoint.writer import write_shards

__all__ = [
    "TINY",
    "Entry",
    "ModelDims",
    "Plain",
    "Quantized",
    "SampleCheckpoint",
    "SampleOptions",
    "Shard",
    "Tensor",
    "choose_dims",
    "source_values",
    "write_checkpoint",
]

DEFAULT_SIZE = 32_000_000
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class SampleOptions:
    """What to make. Dimensions that are None follow from the size; a size that is None follows from the dimensions."""

    hidden: int | None = None
    layers: int | None = None
    experts: int | None = None
    size: int | None = None
    shards: int | None = None
    seed: int = 0
    overwrite: bool = False


TINY = SampleOptions(size=1_700_000)
"""Every kind of tensor in under two megabytes."""


@dataclass(frozen=True)
class SampleCheckpoint:
    """What was written."""

    folder: Path
    seed: int
    dims: ModelDims
    entries: tuple[Entry, ...]
    shards: tuple[Shard, ...]
    total_bytes: int

    @property
    def shard_of(self) -> dict[str, str]:
        """File name of each tensor."""
        return {name: shard.filename for shard in self.shards for name in shard.offsets}


def choose_dims(options: SampleOptions) -> ModelDims:
    """Dimensions for the options: given ones are kept, the engram tables' rows fill the size."""
    given = (options.hidden, options.layers, options.experts)
    if options.size is None and any(value is not None for value in given):
        small = sizing.fit(DEFAULT_SIZE)
        defaults = (small.hidden, small.layers, small.experts)
        pairs = zip(given, defaults, strict=True)
        hidden, layers, experts = (default if value is None else value for value, default in pairs)
        return sizing.with_engram_share(sizing.scaled(hidden, layers, experts))
    return sizing.fit(DEFAULT_SIZE if options.size is None else options.size, *given)


def write_checkpoint(folder: str | Path, options: SampleOptions | None = None) -> SampleCheckpoint:
    """Write a checkpoint into `folder`; the index comes last. The same options give the same bytes.

    Raises DimsError (a ValueError) if no checkpoint with every kind of tensor has these dimensions, and
    FileExistsError if the folder is not empty, unless it is an earlier sample and `overwrite` is set.
    """
    options = options or SampleOptions()
    folder = Path(folder)
    dims = choose_dims(options)
    table = tuple(entries(dims))
    size = total_bytes(dims)
    files = 4 + size // 2_000_000_000 if options.shards is None else options.shards
    shards = tuple(plan_shards(table, files))
    _clear(folder, options.overwrite)
    for path, text in extra_files(dims, options.seed).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    write_shards(folder, shards, table, options.seed, workers=min(4, os.cpu_count() or 1))
    (folder / _INDEX).write_text(index_text(shards, size))
    return SampleCheckpoint(folder, options.seed, dims, table, shards, size)


def _clear(folder: Path, overwrite: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        return
    readme = folder / "README.md"
    ours = readme.is_file() and readme.read_text(errors="replace").startswith(MARKER)
    if not overwrite or not ours:
        advice = "pass --overwrite to replace it" if ours else "it is no earlier sample, so it is left alone"
        raise FileExistsError(f"{folder} is not empty; {advice}")
    for old in [folder / _INDEX, *folder.glob("model-*-of-*.safetensors")]:
        old.unlink(missing_ok=True)


def parse_size(text: str) -> int:
    """Bytes in a size such as 500MB, 8GB (powers of 1000) or 16MiB (powers of 1024)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is no size: write a number and a unit, such as 500MB, 8GB or 16MiB")
    number, prefix, binary = match.groups()
    unit: int = (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " ")
    return round(float(number) * unit)


def _size_option(_context: click.Context, _parameter: click.Parameter, text: str | None) -> int | None:
    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command(epilog="Example: make_checkpoint.py /data/sample --size 8GB --shards 8")
@click.argument("out", type=click.Path(path_type=Path, file_okay=False))
@click.option("--hidden", type=int, help="Hidden size, a multiple of 64 (released: 5120).")
@click.option("--layers", type=int, help="Layers, at least 4 (released: 40).")
@click.option("--experts", type=int, help="Routed experts a layer (released: 384).")
@click.option("--size", callback=_size_option, help="Bytes of all tensors, such as 500MB or 8GB. Default: 32MB.")
@click.option("--shards", type=click.IntRange(1), help="Files. Default: 4, and one more for each 2 GB.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--overwrite", is_flag=True, help="Replace an earlier sample in OUT.")
def main(
    out: Path,
    hidden: int | None,
    layers: int | None,
    experts: int | None,
    size: int | None,
    shards: int | None,
    seed: int,
    overwrite: bool,
) -> None:
    """Write a DeepSeek-V4.1 checkpoint with pseudo-random weights into OUT.

    Names, dtypes, scale shapes, config.json and index are those of the released checkpoint, scaled down. Dimensions
    that are not given follow from the size. Proportions are kept roughly: the engram tables with their scales take
    40% of the bytes (released: 39.7%) and the routed experts most of the rest (53% at 8 GB, released: 58%); e4m3
    weights come to 44% at 8 GB (released: 40%), as small models have relatively more attention.
    """
    options = SampleOptions(hidden, layers, experts, size, shards, seed, overwrite)
    began = time.monotonic()
    try:
        sample = write_checkpoint(out, options)
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error
    dims, seconds = sample.dims, time.monotonic() - began
    click.echo(
        f"{sample.folder}: {sample.total_bytes:,} bytes in {len(sample.shard_of):,} tensors and {len(sample.shards)} "
        f"files; hidden {dims.hidden}, {dims.layers} layers, {dims.experts} experts, engram rows {dims.engram_rows}; "
        f"{seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
