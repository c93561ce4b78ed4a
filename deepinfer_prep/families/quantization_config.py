"""The one reader of quantization configs, which every family asks.

A config lies under one of several keys, in config.json or in a file of its own (hf_quant_config.json, ...), nested
under any wrapper (`text_config`, `thinker_config`, ...). All of them are found and all are heard: one that says nothing
of a weight does not hide another that does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from deepinfer_prep.families.block_size import Blocks, explain
from deepinfer_prep.families.schemes import Block, Scheme, SchemeOf, read_scheme
from deepinfer_prep.files.checkpoint import Checkpoint
from deepinfer_prep.files.container import TensorInfo

_KEYS = ("quantization_config", "compression_config", "quantization", "quant_config")
# A file of its own may hold the config itself, under no key.
_OWN_KEYS = frozenset({"quant_method", "quant_algo", "config_groups", "global_quant_config", "weight_block_size"})
_DEEPEST = 12


class FoundConfig(NamedTuple):
    """One quantization config with the names of the objects that enclose it, and its reader."""

    values: Mapping[str, Any]
    wrappers: tuple[str, ...]
    scheme_of: SchemeOf


class Quantization:
    """What all configs of a checkpoint say of its quantization."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.configs = tuple(
            FoundConfig(values, wrappers, read_scheme(values))
            for name, content in checkpoint.configs.items()
            for values, wrappers in _search(name, content)
        )

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
        parts = set(weight.split("."))
        ordered = sorted(self.configs, key=lambda config: -len(parts & set(config.wrappers)))
        found = (config.scheme_of(weight) for config in ordered)
        return [scheme for scheme in found if scheme is not None]

    def blocks(self, weight: TensorInfo, scale: TensorInfo) -> Blocks:
        """How many rows and columns of an e4m3 weight one value of its scale covers."""
        return explain(weight, scale, self.schemes(weight.name))

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
