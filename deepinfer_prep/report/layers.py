"""Sorts tensor names into kinds and layers: "layers.7.ffn.w1.weight" is layer 7 of "layers.*.ffn.w1.weight"."""

from __future__ import annotations


def kind_and_layer(name: str) -> tuple[str, int | None]:
    """A name with "*" for each of its numbers, and the first of these numbers; None where it has none."""
    layer = None
    parts = name.split(".")
    for position, part in enumerate(parts):
        # Longer numbers are no layers; isascii, because isdigit is true of superscripts too.
        if part.isascii() and part.isdigit() and len(part) <= 6:
            layer = int(part) if layer is None else layer
            parts[position] = "*"
    return ".".join(parts), layer
