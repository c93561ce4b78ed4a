"""Collects the tensors of one small checkpoint, quantizes its weights honestly and writes the folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tests.families.raw import Stored, read_files, write_file, write_index
from tests.families.rules import Blocks, Grid, Rule

Values = npt.NDArray[np.float64]

E4M3_MAX = 448.0
E2M1_MAX = 6.0


@dataclass(frozen=True)
class Style:
    """How a family stores one kind of fp8 weight."""

    scale_suffix: str
    grid: Grid
    scale_dtype: str = "F32"
    power_of_two: bool = False
    weight_suffix: str = ".weight"

    @property
    def rule(self) -> Rule:
        return Rule(self.grid, exponents=self.scale_dtype == "U8")


@dataclass(frozen=True)
class Fp8Weight:
    """An e4m3fn weight, the scale tensor that multiplies it, the rule, and the values before quantization."""

    name: str
    scale: str
    rule: Rule
    source: Values = field(repr=False, compare=False)


@dataclass(frozen=True)
class Layout:
    """A written checkpoint and what is known of it. Every other tensor is stored as it is."""

    name: str
    folder: Path
    files: tuple[str, ...]
    config: Mapping[str, Any]
    weights: tuple[Fp8Weight, ...] = ()
    unscaled: tuple[str, ...] = ()
    """e4m3fn weights with no scale anywhere."""
    fp8_scales: tuple[str, ...] = ()
    """e4m3fn tensors that are scales of something else, and must not be halved."""
    markers: tuple[str, ...] = ()
    """e4m3fn tensors that hold no values."""
    activation_scales: tuple[str, ...] = ()
    """Static scales of activations or of the key-value cache."""
    mixing: tuple[str, ...] = ()
    """float32 hyper-connection matrices."""
    packed: tuple[tuple[str, str], ...] = ()
    """Weights of fewer than eight bits, with their scales: nothing to change in either."""

    def read(self, folder: Path | None = None) -> dict[str, Stored]:
        """Every tensor, from this checkpoint or from another folder with the same files."""
        return read_files(folder or self.folder, self.files)

    def dequantize(self, folder: Path | None = None) -> dict[str, Values]:
        """The values of every fp8 weight by the family's own rule, from here or from another folder."""
        stored = self.read(folder)
        return {w.name: w.rule(stored[w.name].values, stored[w.scale].values) for w in self.weights}

    @property
    def scales(self) -> tuple[str, ...]:
        """The scale tensors of the fp8 weights, each once."""
        return tuple(dict.fromkeys(weight.scale for weight in self.weights))


@dataclass(frozen=True)
class Package:
    """What surrounds the tensors: config, file names, header metadata, other files."""

    config: Mapping[str, Any]
    files: tuple[str, ...] = ("model.safetensors",)
    scatter: bool = False
    metadata: Mapping[str, str] | None = field(default_factory=lambda: {"format": "pt"})
    texts: Mapping[str, str] = field(default_factory=dict)
    config_file: str | None = "config.json"


def shard_names(count: int, pattern: str = "model-{:05}-of-{:05}.safetensors") -> tuple[str, ...]:
    """The usual names of `count` shards."""
    return tuple(pattern.format(number, count) for number in range(1, count + 1))


class Builder:
    """Adds tensors in file order; `finish` writes them."""

    def __init__(self, name: str, seed: int) -> None:
        self.tensors: dict[str, Stored] = {}
        self._random = np.random.default_rng([seed, *name.encode()])
        self._facts = Layout(name, Path(), (), {})

    def add(self, name: str, stored: Stored) -> str:
        if name in self.tensors:
            raise ValueError(f"{name} is there already")
        self.tensors[name] = stored
        return name

    def values(self, *shape: int) -> Values:
        """Normal values with a factor for each row and, about one in a thousand, outliers."""
        values = self._random.standard_normal(shape) * np.where(self._random.random(shape) < 0.001, 0.32, 0.02)
        row_factors = np.exp2(self._random.uniform(-2, 2, size=(*shape[:-1], 1))) if len(shape) > 1 else 1.0
        return np.asarray(values * row_factors)

    def plain(self, dtype: str, name: str, *shape: int) -> str:
        """A tensor that is not quantized."""
        return self.add(name, Stored.of(dtype, self.values(*shape)))

    def integers(self, dtype: str, name: str, high: int, *shape: int) -> str:
        return self.add(name, Stored.of(dtype, self._random.integers(0, high, shape)))

    def mixing(self, name: str, *shape: int) -> None:
        """A float32 hyper-connection matrix."""
        self._note("mixing", self.plain("F32", name, *shape))

    def fp8(self, module: str, *shape: int, style: Style) -> None:
        """An e4m3fn weight and, right after it, its scale."""
        name, scale_name = module + style.weight_suffix, module + style.scale_suffix
        source = self.values(*shape)
        scale = scale_for(source, style, E4M3_MAX)
        self._quantize(name, source, style, scale)
        self.add(scale_name, scale)
        self._note("weights", Fp8Weight(name, scale_name, style.rule, source))

    def fp8_shared(self, names: Sequence[str], scale_name: str, *shape: int, style: Style) -> None:
        """Several e4m3fn weights that one per-tensor scale multiplies."""
        sources = [self.values(*shape) for _ in names]
        scale = scale_for(np.stack(sources), style, E4M3_MAX)
        for name, source in zip(names, sources, strict=True):
            self._quantize(name, source, style, scale)
            self._note("weights", Fp8Weight(name, scale_name, style.rule, source))
        self.add(scale_name, scale)

    def fp8_unscaled(self, name: str, *shape: int, spread: float = 1.0) -> None:
        """A plain cast to e4m3fn. With a `spread` of 2,000 codes above 240 occur."""
        source = np.clip(self.values(*shape) * spread, -E4M3_MAX, E4M3_MAX)
        self._note("unscaled", self.add(name, Stored.of("F8_E4M3", source)))

    def marker(self, name: str, *shape: int) -> None:
        """An e4m3fn tensor that only says how others are stored."""
        self._note("markers", self.add(name, Stored.of("F8_E4M3", np.zeros(shape))))

    def fp4(self, module: str, rows: int, columns: int) -> None:
        """A packed e2m1 weight (I8, even column in the low four bits) and its scales for 32 columns of a row."""
        style = Style(".scale", Blocks(1, 32), "F8_E8M0")
        source = self.values(rows, columns)
        scale = scale_for(source, style, E2M1_MAX)
        quotient = source / style.rule(np.ones(source.shape), scale.values)
        nibbles = quotient.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        packed = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        weight = self.add(module + ".weight", Stored("I8", packed.shape, packed.tobytes()))
        self.note_packed(weight, self.add(module + ".scale", scale))

    def activation_scale(self, name: str, *shape: int, dtype: str = "F32") -> None:
        """A static scale calibrated for a range of 448."""
        amax = np.abs(self._random.standard_normal(shape)) * 4 + 1
        self._note("activation_scales", self.add(name, Stored.of(dtype, amax / E4M3_MAX)))

    def fp8_scale(self, name: str, *shape: int) -> None:
        """An e4m3fn tensor of positive block scales up to 448."""
        values = np.exp2(self._random.uniform(0, 8.8, shape))
        self._note("fp8_scales", self.add(name, Stored.of("F8_E4M3", values)))

    def note_packed(self, weight: str, scale: str) -> None:
        self._note("packed", (weight, scale))

    def finish(self, folder: Path, package: Package) -> Layout:
        """Write the checkpoint. Tensors go to the files in equal runs or, with `scatter`, in turns."""
        folder.mkdir(parents=True, exist_ok=True)
        if package.config_file:
            (folder / package.config_file).write_text(json.dumps(package.config, indent=2))
        for path, text in package.texts.items():
            (folder / path).write_text(text)
        count = len(package.files)
        weight_map = {
            name: package.files[n % count if package.scatter else n * count // len(self.tensors)]
            for n, name in enumerate(self.tensors)
        }
        for file in package.files:
            tensors = {name: stored for name, stored in self.tensors.items() if weight_map[name] == file}
            write_file(folder / file, tensors, package.metadata)
        if count > 1:
            write_index(folder / "model.safetensors.index.json", weight_map, self.tensors)
        return replace(self._facts, folder=folder, files=package.files, config=package.config)

    def _quantize(self, name: str, source: Values, style: Style, scale: Stored) -> None:
        quotient = source / style.rule(np.ones(source.shape), scale.values)
        self.add(name, Stored.of("F8_E4M3", quotient))

    def _note(self, field_name: str, fact: Any) -> None:
        change: dict[str, Any] = {field_name: (*getattr(self._facts, field_name), fact)}
        self._facts = replace(self._facts, **change)


def scale_for(source: Values, style: Style, largest: float) -> Stored:
    """The scales that bring each block's largest magnitude to `largest`, stored as the family stores them."""
    shape = style.grid.scale_shape(source.shape)
    amax = np.zeros(int(np.prod(shape)))
    np.maximum.at(amax, style.grid.scale_index(source.shape).reshape(-1), np.abs(source).reshape(-1))
    scale = np.maximum(amax, 1e-4).reshape(shape) / largest
    if style.power_of_two or style.scale_dtype in ("U8", "F8_E8M0"):
        mantissa, exponent = np.frexp(scale)
        scale = np.ldexp(1.0, exponent - (mantissa == 0.5))
    if style.scale_dtype == "U8":
        scale = np.log2(scale) + 127
    return Stored.of(style.scale_dtype, scale)
