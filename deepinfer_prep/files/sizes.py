"""Sizes as people write and read them: "16MiB", "8GB"."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1}
_UNITS |= {prefix + "b": 1000 ** (power + 1) for power, prefix in enumerate("kmgt")}
_UNITS |= {prefix + "ib": 1024 ** (power + 1) for power, prefix in enumerate("kmgt")}


def parse_size(text: str) -> int:
    """Bytes of a size such as "16MiB", "8GB" or "4096".

    Raises:
        ValueError: the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write a number with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    return int(float(match[1]) * unit)


def format_size(count: int) -> str:
    """Bytes in decimal units, three significant digits: "98.3 GB"."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"
