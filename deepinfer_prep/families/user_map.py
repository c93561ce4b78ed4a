"""What the user states by hand: which scale belongs to a weight (--map) and how it lies (--block).

In a pattern `*` stands for any characters, dots included, and every other character for itself. The first `*` of
SCALE takes what the first `*` of WEIGHT matched, the second what the second matched, and so on; SCALE may have
fewer. `*.weight=*.weight_qscale` pairs `a.b.weight` with `a.b.weight_qscale`; `*.table.*.weight=*.table.scale` gives
all parts of a table one scale. `:e8m0` after SCALE says that its U8 bytes are exponents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from deepinfer_prep.families.block_size import fits, grid_problem
from deepinfer_prep.families.pairing import scale_problem
from deepinfer_prep.families.patterns import compile_pattern, fill_pattern
from deepinfer_prep.families.protocol import Layout, fp8_names
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.families.schemes import Block, as_block
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.quantized import QuantizedWeight

NAME = "map"
EXPONENTS = ":e8m0"


@dataclass(frozen=True, slots=True)
class ScaleMap:
    """One --map: a pattern of weight names and the pattern of their scales' names."""

    weight: str
    scale: str
    exponents: bool = False
    """U8 scales are e8m0."""

    def __str__(self) -> str:
        return f"{self.weight}={self.scale}{EXPONENTS if self.exponents else ''}"


def parse_map(text: str) -> ScaleMap:
    """Parse WEIGHT=SCALE or WEIGHT=SCALE:e8m0.

    Raises:
        ValueError: it is not of that form, or SCALE has more `*` than WEIGHT.
    """
    weight, equals, scale = text.partition("=")
    exponents = scale.endswith(EXPONENTS)
    scale = scale.removesuffix(EXPONENTS)
    if not weight or not equals or not scale or "=" in scale:
        raise ValueError(f"{text!r} is not WEIGHT=SCALE, two patterns of tensor names")
    if scale.count("*") > weight.count("*"):
        raise ValueError(f"{text!r} has more * in SCALE than in WEIGHT, so that nothing could take their place")
    return ScaleMap(weight, scale, exponents)


def parse_block(text: str) -> tuple[str, Block]:
    """Parse WEIGHT=ROWSxCOLUMNS, such as `*.down_proj.weight=128x128`.

    Raises:
        ValueError: it is not of that form.
    """
    weight, equals, size = text.rpartition("=")
    block = as_block(size)
    if not weight or not equals or block is None:
        raise ValueError(f"{text!r} is not WEIGHT=ROWSxCOLUMNS, a pattern of weight names and two whole numbers")
    return weight, block


def map_scales(checkpoint: Checkpoint, quantization: Quantization, maps: Iterable[str]) -> Layout:
    """Pair the fp8 weights that the maps name; a map that pairs nothing, or with what is no scale, is refused.

    Raises:
        ValueError: as `parse_map`.
    """
    weights: list[QuantizedWeight] = []
    refusals: list[str] = []
    for scale_map in map(parse_map, maps):
        pairs = list(_pairs(checkpoint, scale_map))
        found = [(weight, scale) for weight, scale in pairs if scale in checkpoint.tensors]
        if not found:
            refusals.append(_explain_nothing(scale_map, pairs))
        for weight, scale in found:
            problem = _problem(checkpoint, weight, scale, scale_map.exponents or quantization.has_exponents(weight))
            if problem:
                refusals.append(f"--map {scale_map}: {problem}")
                break
            blocks = quantization.blocks(checkpoint.tensors[weight], checkpoint.tensors[scale])
            weights.append(QuantizedWeight(weight, scale, "e4m3", blocks.size, blocks.problem))
    return Layout(NAME, tuple(weights), refusals=tuple(refusals))


def state_blocks(checkpoint: Checkpoint, layout: Layout, blocks: Iterable[str]) -> Layout:
    """The layout with the blocks that the user states; where several name a weight, the last one counts.

    One that names no e4m3 weight with a scale, or does not give its scale's grid, is refused.

    Raises:
        ValueError: as `parse_block`.
    """
    stated = [(compile_pattern(pattern), pattern, block) for pattern, block in map(parse_block, blocks)]
    weights = {weight.weight: weight for weight in layout.weights}
    refusals: list[str] = []
    for compiled, pattern, block in stated:
        option = f"--block {pattern}={block[0]}x{block[1]}"
        named = [
            weight for weight in weights.values() if weight.element == "e4m3" and compiled.fullmatch(weight.weight)
        ]
        if not named:
            refusals.append(f"{option} matches no F8_E4M3 tensor that has a scale. Compare it with the names.")
        for found in named:
            weight, scale = checkpoint.tensors[found.weight], checkpoint.tensors[found.scale]
            if not fits(weight, scale, "e4m3", block):
                problem = grid_problem(weight, scale, "e4m3", block)
                refusals.append(f"{option}: {checkpoint.where(found.weight)}: {problem}. Make the pattern narrower.")
                break
            weights[found.weight] = replace(found, block=block, block_problem="")
    return replace(layout, weights=tuple(weights.values()), refusals=(*layout.refusals, *refusals))


def _pairs(checkpoint: Checkpoint, scale_map: ScaleMap) -> Iterator[tuple[str, str]]:
    pattern = compile_pattern(scale_map.weight)
    for name in fp8_names(checkpoint):
        match = pattern.fullmatch(name)
        if match is not None:
            yield name, fill_pattern(scale_map.scale, match.groups())


def _explain_nothing(scale_map: ScaleMap, pairs: list[tuple[str, str]]) -> str:
    if not pairs:
        return f"--map {scale_map} matches no F8_E4M3 tensor. Compare the pattern with the names in the checkpoint."
    weight, scale = pairs[0]
    return (
        f"--map {scale_map} matches {len(pairs):,} F8_E4M3 tensors, but none of the scales is there: {scale!r} for "
        f"{weight!r} first of all. Compare the pattern with the names in the checkpoint."
    )


def _problem(checkpoint: Checkpoint, weight: str, scale: str, has_exponents: bool) -> str:
    if weight == scale:
        return f"{weight!r} cannot be its own scale."
    unpaired = scale_problem(checkpoint.tensors[scale], has_exponents)
    return f"tensors like {weight!r} {unpaired.problem}. {unpaired.advice}" if unpaired else ""
