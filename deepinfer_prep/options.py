"""The choices that change an output, or whether there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from deepinfer_prep.families.user_map import parse_block, parse_map

UnscaledRule = Literal["refuse", "copy-if-safe"]
ActivationScaleRule = Literal["keep", "double"]
ImplausibleRule = Literal["refuse", "accept"]
WeightOrder = Literal["stored", "kernel"]

_RULES: Mapping[str, Any] = {
    "unscaled": UnscaledRule,
    "activation_scales": ActivationScaleRule,
    "implausible_scales": ImplausibleRule,
    "layout": WeightOrder,
}


@dataclass(frozen=True, slots=True)
class Options:
    """Choices of one conversion; a journal is trusted only for the same ones, and the manifest records them.

    Raises:
        ValueError: a value is none of those allowed, or a map or a block is not of its form.
    """

    strict: bool = False
    """Refuse NaN codes in fp8 weights instead of keeping and counting them."""
    maps: tuple[str, ...] = ()
    """WEIGHT=SCALE patterns for weights whose scale no family finds (see `families.user_map`)."""
    blocks: tuple[str, ...] = ()
    """WEIGHT=ROWSxCOLUMNS: the blocks of weights for which nothing states them, or something else does."""
    unscaled: UnscaledRule = "refuse"
    """What happens to fp8 tensors without a scale: copied only where the hardware reads every code alike."""
    split: tuple[str, ...] = ()
    """Patterns of more F32 matrices to split into bf16 halves."""
    activation_scales: ActivationScaleRule = "double"
    """What happens to static scales of e4m3 activations and of an fp8 KV cache: x / 2s fits a type that ends at 240."""
    implausible_scales: ImplausibleRule = "refuse"
    """What happens where a scale makes weights of a size that no model has, as one that divides does."""
    layout: WeightOrder = "stored"
    """How the bytes of weights stand in the output: as they are stored, or as the GEMM kernels read them."""

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            if getattr(self, name) not in get_args(rule):
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed are {', '.join(get_args(rule))}")
        for text in self.maps:
            parse_map(text)
        for text in self.blocks:
            parse_block(text)

    def to_json(self) -> dict[str, Any]:
        """As JSON gives it back: with lists for tuples, and without `layout` where it is the stored one."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        if self.layout == "stored":
            del values["layout"]  # Outputs of this layout are, byte for byte, those of versions that knew no other.
        return values

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Options:
        """The options that `to_json` wrote.

        Raises:
            TypeError, ValueError: they are not options of this version.
        """
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        for name in ("maps", "blocks", "split"):
            if name in values and not _is_texts(values[name]):
                raise TypeError(f"{name} is no list of texts")
        if not isinstance(values.get("strict", False), bool):
            raise TypeError("strict is neither true nor false")
        return cls(**values)


def _is_texts(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
