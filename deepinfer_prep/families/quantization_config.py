"""The one reader of quantization configs, which every family asks.

A config lies under one of several keys, in config.json or in a file of its own (hf_quant_config.json, ...), nested
under any wrapper (`text_config`, `thinker_config`, ...). All of them are found and all are heard: one that says nothing
of a weight does not hide another that does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from deepinfer_prep.families.block_size import Blocks, by_scheme, explain
from deepinfer_prep.families.schemes import Block, Scheme, SchemeOf, read_scheme
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.files.container import TensorInfo

_KEYS = ("quantization_config", "compression_config", "quantization", "quant_config")
# A file of its own may hold the config itself, under no key.
_OWN_KEYS = frozenset({"quant_method", "quant_algo", "config_groups", "global_quant_config", "weight_block_size"})
_DEEPEST = 12


class FoundConfig(NamedTuple):
    """One quantization config with its file, the names of the objects that enclose it, and its reader."""

    file: str
    values: Mapping[str, Any]
    wrappers: tuple[str, ...]
    scheme_of: SchemeOf

    @property
    def where(self) -> str:
        """The file, and the objects in it."""
        return f"{self.file} ({' in '.join(reversed(self.wrappers))})" if self.wrappers else self.file


class Conflict(NamedTuple):
    """Two configs that both give the grid of a weight's scale, by different blocks."""

    configs: tuple[str, str]
    blocks: tuple[Block, Block]


class Quantization:
    """What all configs of a checkpoint say of its quantization."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.configs = tuple(
            FoundConfig(name, values, wrappers, read_scheme(values))
            for name, content in checkpoint.configs.items()
            for values, wrappers in _search(name, content)
        )
        self.conflicts: dict[str, Conflict] = {}
        """Weights whose blocks were asked for and that no config decides, as two of them contradict one another."""

    def has_method(self, start: str) -> bool:
        """Whether a config's `quant_method` starts so."""
        return any(str(config.values.get("quant_method", "")).startswith(start) for config in self.configs)

    def has_key(self, key: str) -> bool:
        """Whether a config states something under this key."""
        return any(config.values.get(key) for config in self.configs)

    def values_of(self, key: str) -> list[Any]:
        """What the configs hold under a key, those of config.json first; empty values are left out."""
        return [config.values[key] for config in self.configs if config.values.get(key)]

    def schemes(self, weight: str) -> list[Scheme]:
        """What the configs say of a weight; those whose wrappers occur in its name first."""
        return [scheme for _, _, scheme in self._ranked(weight)]

    def _ranked(self, weight: str) -> list[tuple[int, FoundConfig, Scheme]]:
        """How many wrappers of a config the weight's name has, the config, and what it says; most wrappers first."""
        parts = set(weight.split("."))
        found = ((-len(parts & set(config.wrappers)), config, config.scheme_of(weight)) for config in self.configs)
        said = [(rank, config, scheme) for rank, config, scheme in found if scheme is not None]
        return sorted(said, key=lambda item: item[0])

    def blocks(self, weight: TensorInfo, scale: TensorInfo) -> Blocks:
        """How many rows and columns of an e4m3 weight one value of its scale covers."""
        ranked = self._ranked(weight.name)
        found = explain(weight, scale, [scheme for _, _, scheme in ranked])
        if len(ranked) > 1 and found.size is not None:
            conflict = _find_conflict(weight, scale, ranked)
            if conflict is not None:
                self.conflicts[weight.name] = conflict
                return Blocks(None, f"{' and '.join(conflict.configs)} state different blocks")
        return found

    def stated_blocks(self, weight: str) -> list[Block]:
        """The block sizes that the configs state for a weight."""
        return [scheme.block for scheme in self.schemes(weight) if scheme.block is not None]

    def has_exponents(self, weight: str) -> bool:
        """Whether the configs say that a weight's scale in U8 is e8m0."""
        return any(scheme.exponents for scheme in self.schemes(weight))

    def is_fp8(self, weight: str) -> bool:
        """Whether a config says that a weight's values are e4m3, and none says otherwise of its very module."""
        found = self.schemes(weight)
        return any(scheme.is_fp8 for scheme in found) and not any(
            scheme.strategy == "unknown" and not scheme.is_fp8 for scheme in found
        )


def _find_conflict(
    weight: TensorInfo, scale: TensorInfo, ranked: list[tuple[int, FoundConfig, Scheme]]
) -> Conflict | None:
    """The first two configs of the rank that decides whose blocks are not the same for this weight."""
    fitting = [
        (rank, config, blocks.size)
        for rank, config, scheme in ranked
        if (blocks := by_scheme(weight, scale, scheme)).size is not None
    ]
    first_rank, first, block = fitting[0]
    for rank, config, other in fitting[1:]:
        if rank == first_rank and _clipped(other, weight) != _clipped(block, weight):
            return Conflict((first.where, config.where), (block, other))
    return None


def _clipped(block: Block, weight: TensorInfo) -> Block:
    """A block as far as it covers the weight: one larger than it is none other than one of its size."""
    return min(block[0], weight.shape[-2]), min(block[1], weight.shape[-1])


def _search(name: str, content: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], tuple[str, ...]]]:
    """The quantization configs in one JSON file, outer ones first, with the wrappers around each."""
    if name != "config.json" and _OWN_KEYS & content.keys():
        yield content, ()
        return
    level: list[tuple[Any, tuple[str, ...]]] = [(content, ())]
    for _ in range(_DEEPEST):
        inner: list[tuple[Any, tuple[str, ...]]] = []
        for place, wrappers in level:
            if isinstance(place, dict):
                yield from ((place[key], wrappers) for key in _KEYS if isinstance(place.get(key), dict))
                inner += [
                    (value, (*wrappers, key.removesuffix("_config")))
                    for key, value in place.items()
                    if key not in _KEYS and isinstance(value, (dict, list))
                ]
            else:
                inner += [(value, wrappers) for value in place if isinstance(value, (dict, list))]
        level = inner
