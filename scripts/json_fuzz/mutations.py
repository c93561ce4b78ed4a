"""Changes a JSON text as damage, carelessness or malice would."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**70,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "a",
    "..",
    "../../x.safetensors",
    "/etc/passwd",
    "e4m3",
    "re:(a+)+$",
    "*a*a*a*a*a*b",
    "\x1b[2J\n",
    "\ud800",
    "x" * 5000,
    [],
    {},
    [0, 0],
    [128],
    [[]],
    {"": {}},
]


def mutate(text: bytes, chance: random.Random) -> bytes:
    """The text with one to four changes, most of them of its values, some of its bytes."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        text = _change_bytes(text, chance) if chance.random() < 0.3 else _change_value(text, chance)
    return text


def _change_bytes(text: bytes, chance: random.Random) -> bytes:
    data = bytearray(text)
    at = chance.randrange(len(data) + 1)
    match chance.randrange(5):
        case 0:
            return bytes(data[:at])
        case 1 if data:
            data[at % len(data)] = chance.randrange(256)
        case 2:
            data[at:at] = bytes([chance.choice(b'{}[],:"\\0 -1e')]) * chance.choice((1, 2, 3000))
        case 3:
            del data[at : at + chance.randrange(1, 40)]
        case _:
            piece = data[at : at + chance.randrange(1, 60)]
            data[at:at] = piece
    return bytes(data)


def _change_value(text: bytes, chance: random.Random) -> bytes:
    lines = text.split(b"\n")
    # A journal is JSON line by line.
    place = chance.randrange(len(lines)) if len(lines) > 2 and lines[0].startswith(b'{"format"') else -1
    try:
        value = json.loads(lines[place] if place >= 0 else text)
    except (ValueError, RecursionError):
        return _change_bytes(text, chance)
    changed = json.dumps(_changed(value, chance)).encode()
    if place < 0:
        return changed
    lines[place] = changed
    return b"\n".join(lines)


def _changed(value: Any, chance: random.Random) -> Any:
    """The value with something somewhere in it replaced, removed, repeated or renamed."""
    value = copy.deepcopy(value)
    holder: Any = None
    key: Any = None
    found = value
    while isinstance(found, (dict, list)) and found and (holder is None or chance.random() < 0.8):
        holder = found
        key = chance.choice([*found]) if isinstance(found, dict) else chance.randrange(len(found))
        found = found[key]
    if holder is None:
        return chance.choice(VALUES)
    match chance.randrange(5):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[chance.choice(["", "..", "../x", "x" * 5000, "a\nb", "format_version"])] = found
        case 1:
            holder.insert(key, found)
        case 2 if isinstance(holder, dict):
            other = chance.choice([*holder])
            holder[key] = copy.deepcopy(holder[other])
        case _:
            holder[key] = copy.deepcopy(chance.choice(VALUES))
    return value
