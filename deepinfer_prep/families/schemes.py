"""What one quantization config says of a weight: how its scales lie, and what its values and scales are.

Every quantizer writes a dialect of its own: transformers' `weight_block_size`, auto-round's `group_size`,
compressed-tensors' `config_groups`, ModelOpt's `quant_algo`, Quark's `qscheme`. The dialect is told by the keys that a
config has, never by the file or the wrapper that it lies in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deepinfer_prep.families.patterns import ForeignPattern, ModuleTable, PatternClock

Block = tuple[int, int]
"""Rows and columns of a weight that one scale value covers."""

Strategy = Literal["by shape", "tensor", "row", "block", "unknown"]


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a config says of one weight."""

    strategy: Strategy = "by shape"
    """How scales lie. "by shape": as the scale's shape shows, in blocks of `block` where it shows none."""
    block: Block | None = None
    says: str = ""
    """The statement as a sentence part, for a scale that is stored otherwise; for "unknown" what is not understood."""
    exponents: bool = False
    """Scales in U8 are e8m0 exponents."""
    is_fp8: bool = False
    """The weight's values are e4m3."""


SchemeOf = Callable[[str], Scheme | None]
"""Weight name -> what the config says of it; None where it says nothing."""

_PLAIN_KEYS = ("weight_block_size", "block_size", "block_structure", "group_size")
_EXPONENT_WORDS = re.compile(r"mxfp|mx_fp|mx-fp|e8m0", re.IGNORECASE)
_FORMAT_KEYS = (
    *("quant_method", "quant_algo", "quant_type", "format", "packing_format", "fmt", "mode", "qscheme", "algorithm"),
    *("data_type", "dtype", "type", "weight_dtype", "weight_format", "quant_format", "qformat_weight"),
)
_SCALE_KEYS = ("scale_fmt", "scale_format", "scale_dtype", "scale_type", "scale_data_type")
_FP8_WORDS = re.compile(r"fp8|float8|e4m3|f8_e4", re.IGNORECASE)
_NARROWER = re.compile(r"w4|int4|fp4|nvfp4|w8a8_int|int8|awq|gptq", re.IGNORECASE)


def read_scheme(config: Mapping[str, Any]) -> SchemeOf:
    """The reader of one config, in whichever dialect it is written."""
    method = str(config.get("quant_method", ""))
    if "quant_algo" in config or "quantized_layers" in config:
        return _modelopt(config)
    if isinstance(config.get("config_groups"), dict) or method == "compressed-tensors":
        return _compressed_tensors(config)
    if method == "quark" or "global_quant_config" in config or "layer_quant_config" in config:
        return _quark(config)
    if method == "fbgemm_fp8":
        return lambda _: Scheme("row", says="the format has one scale a row", is_fp8=True)
    return _plain(config)


def as_block(value: Any) -> Block | None:
    """Two positive whole numbers, as a JSON list (without leading axes of 1) or as "128x128", as a block, or None."""
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})", value)
        value = [int(number) for number in match.groups()] if match else None
    if not isinstance(value, (list, tuple)) or not all(type(number) is int and number > 0 for number in value):
        return None
    if len(value) < 2 or any(number != 1 for number in value[:-2]):
        return None
    return value[-2], value[-1]


def states_exponents(config: Mapping[str, Any]) -> bool:
    """Whether a config says that U8 scales are e8m0 exponents and not numbers.

    Said by the format of scales, by the name of an MX format, or by blocks of 1x32, which only the MX formats have
    (OCP microscaling specification 1.0).
    """
    scales = [str(config.get(key, "")).lower() for key in _SCALE_KEYS]
    formats = [str(config.get(key, "")) for key in _FORMAT_KEYS]
    return (
        any("e8m0" in text or text.rpartition(".")[2] == "uint8" for text in scales)
        or any(_EXPONENT_WORDS.search(text) for text in formats)
        or as_block(config.get("weight_block_size")) == (1, 32)
    )


def states_fp8(config: Mapping[str, Any]) -> bool:
    """Whether a config says that weights are eight-bit floats, and nothing narrower."""
    formats = [str(config.get(key, "")) for key in _FORMAT_KEYS]
    said = any(_FP8_WORDS.search(text) for text in formats) or (
        config.get("type") == "float" and config.get("num_bits") == 8
    )
    return said and not any(_NARROWER.search(text) for text in formats)


def _grouped(config: Mapping[str, Any]) -> Scheme | None:
    """What the keys that state a block or group say; None where there is none."""
    for key in _PLAIN_KEYS:
        value = config.get(key)
        block = as_block(value)
        if block is not None:
            return Scheme(block=block)
        if key == "group_size" and type(value) is int:
            return Scheme(block=(1, value)) if value > 0 else Scheme()
    return None


def _plain(config: Mapping[str, Any]) -> SchemeOf:
    """transformers' fp8 quantizers and auto-round, whose `extra_config` holds exceptions by module or pattern."""
    exceptions = _table(config.get("extra_config"), PatternClock())
    usual = _by_keys(config)

    def read(weight: str) -> Scheme:
        own = exceptions.find(weight.rpartition(".")[0])
        return _by_keys({**config, **own}) if isinstance(own, dict) else usual

    return read


def _by_keys(values: Mapping[str, Any]) -> Scheme:
    found = _grouped(values) or Scheme()
    exponents = states_exponents(values)
    block = found.block or ((1, 32) if exponents and any(map(_is_mx, _texts(values))) else None)
    return Scheme(block=block, exponents=exponents, is_fp8=states_fp8(values))


def _texts(config: Mapping[str, Any]) -> Iterator[str]:
    return (str(config.get(key, "")) for key in _FORMAT_KEYS)


def _is_mx(text: str) -> bool:
    return _EXPONENT_WORDS.search(text) is not None and "e8m0" not in text.lower()


def _table(entries: Any, clock: PatternClock) -> ModuleTable[Any]:
    return ModuleTable(entries if isinstance(entries, dict) else {}, clock)


def _compressed_tensors(config: Mapping[str, Any]) -> SchemeOf:
    groups = _fp8_groups(config, PatternClock())
    is_mx = states_exponents(config)

    def read(weight: str) -> Scheme:
        arguments = _arguments_of(weight, groups)
        if arguments is None:
            return Scheme(
                "unknown",
                says="the config does not say which of its schemes covers this weight",
                exponents=is_mx,
                is_fp8=bool(groups),
            )
        return _by_strategy(arguments, is_mx or states_exponents(arguments))

    return read


@dataclass(frozen=True, slots=True)
class _Group:
    """The fp8 groups of a config whose scales lie in one way: the modules that they name, and that way."""

    modules: frozenset[str]
    patterns: tuple[ForeignPattern, ...]
    arguments: Mapping[str, Any]

    def names(self, module: str) -> bool:
        return module in self.modules or any(pattern.match(module) for pattern in self.patterns)


def _fp8_groups(config: Mapping[str, Any], clock: PatternClock) -> list[_Group]:
    groups = config.get("config_groups")
    values = list(groups.values()) if isinstance(groups, dict) else []
    alike: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for value in values:
        arguments = value.get("weights") if isinstance(value, dict) else None
        if isinstance(arguments, dict) and states_fp8(arguments):
            alike.setdefault(_geometry(arguments), []).append(value)
    return [_merge(group, clock) for group in alike.values()]


def _geometry(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(repr(arguments.get(key)) for key in ("strategy", "block_structure", "group_size", "scale_dtype"))


def _merge(groups: list[Mapping[str, Any]], clock: PatternClock) -> _Group:
    listed = [group["targets"] for group in groups if isinstance(group.get("targets"), list)]
    targets = [target for each in listed for target in each if isinstance(target, str)]
    patterns = (_compile(target[3:], clock) for target in targets if target.startswith("re:"))
    known = tuple(pattern for pattern in patterns if pattern is not None)
    return _Group(frozenset(targets), known, groups[0]["weights"])


def _compile(pattern: str, clock: PatternClock) -> ForeignPattern | None:
    try:
        return ForeignPattern(pattern, clock)
    except ValueError:
        return None


def _arguments_of(weight: str, groups: list[_Group]) -> Mapping[str, Any] | None:
    """The `weights` arguments of the group that covers a weight; None where names cannot decide.

    A target that is a module class cannot be matched from names, so class targets decide only where all groups left
    agree.
    """
    if len(groups) > 1:
        module = weight.rpartition(".")[0]
        groups = [group for group in groups if group.names(module)] or groups
    return groups[0].arguments if len(groups) == 1 else None


def _by_strategy(arguments: Mapping[str, Any], exponents: bool) -> Scheme:
    strategy, size = arguments.get("strategy"), arguments.get("group_size")
    block = as_block(arguments.get("block_structure")) or as_block(size)
    if strategy == "tensor":
        return Scheme("tensor", says="the config says one value", exponents=exponents, is_fp8=True)
    if strategy == "channel":
        return Scheme("row", says="the config says one value a row", exponents=exponents, is_fp8=True)
    if strategy in ("block", "group") and block is not None:
        return Scheme("block", block, exponents=exponents, is_fp8=True)
    if strategy == "group" and type(size) is int and size > 0:
        return Scheme("block", (1, size), exponents=exponents, is_fp8=True)
    says = f"the config's strategy {strategy!r} is not one of tensor, channel, block and group with their sizes"
    return Scheme("unknown", says=says, exponents=exponents, is_fp8=True)


def _modelopt(config: Mapping[str, Any]) -> SchemeOf:
    layers = _table(config.get("quantized_layers"), PatternClock())

    def entry_of(weight: str) -> Mapping[str, Any]:
        """The entry of the weight's module or of its nearest parent that has one, by name or pattern."""
        module = weight
        while module:
            entry = layers.find(module)
            if isinstance(entry, dict):
                return entry
            module = module.rpartition(".")[0]
        return {}

    def read(weight: str) -> Scheme | None:
        entry = entry_of(weight)
        algorithm = str(entry.get("quant_algo") or config.get("quant_algo") or "").upper()
        if algorithm in ("", "MIXED_PRECISION"):
            return Scheme("by shape")
        return _by_algorithm(algorithm, {**config, **entry})

    return read


def _by_algorithm(algorithm: str, config: Mapping[str, Any]) -> Scheme:
    """ModelOpt's and TensorRT-LLM's names for one thing: FP8_PB_WO, FP8_BLOCK_SCALES, FP8_2D_BLOCKWISE_WEIGHT_ONLY."""
    says = f"quant_algo {algorithm!r} "
    if "MXFP8" in algorithm:
        return Scheme("block", (1, 32), exponents=True, is_fp8=True)
    if not algorithm.startswith("FP8") and not algorithm.startswith("W8A8_FP8"):
        return Scheme("unknown", says=f"{says}does not say how the scales of an fp8 weight lie")
    if "BLOCK" in algorithm or "_PB" in algorithm:
        stated = (as_block(config.get(key)) for key in _PLAIN_KEYS)
        return Scheme("block", next((block for block in stated if block is not None), (128, 128)), is_fp8=True)
    if "CHANNEL" in algorithm or "_PC" in algorithm or "ROW" in algorithm:
        return Scheme("row", says=f"{says}says one value a row", is_fp8=True)
    return Scheme("tensor", says=f"{says}says one value", is_fp8=True)


def _quark(config: Mapping[str, Any]) -> SchemeOf:
    layers = _table(config.get("layer_quant_config"), PatternClock())

    def read(weight: str) -> Scheme:
        chosen = layers.find(weight.rpartition(".")[0])
        return _by_qscheme(chosen if chosen is not None else config.get("global_quant_config"))

    return read


def _by_qscheme(entry: Any) -> Scheme:
    scheme = entry.get("weight") if isinstance(entry, dict) else None
    scheme = scheme if isinstance(scheme, dict) else {}
    kind, exponents, is_fp8 = scheme.get("qscheme"), states_exponents(scheme), states_fp8(scheme)
    if kind == "per_tensor":
        return Scheme("tensor", says="the config says one value", exponents=exponents, is_fp8=is_fp8)
    if kind in ("per_channel", "per_token") and scheme.get("ch_axis") in (0, None):
        return Scheme("row", says="the config says one value a row", exponents=exponents, is_fp8=is_fp8)
    found = _grouped(scheme) if kind in ("per_group", "per_block") else None
    if found is not None and found.block is not None:
        return Scheme("block", found.block, exponents=exponents, is_fp8=is_fp8)
    says = f"the config's qscheme {kind!r} does not say which rows and columns a scale covers"
    return Scheme("unknown", says=says, exponents=exponents, is_fp8=is_fp8)
