"""Makes safetensors files from a source of random choices: valid ones, then mutated at any level.

Levels: the tree of the header (dtypes, shapes, offsets, fields, names, metadata), its JSON text, the length
prefix, and the data behind it.
"""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

from deepinfer_prep.quantized import DTYPES

_NAMES = (
    "",
    "a",
    "b.weight",
    "layers.0.mlp.weight",
    "../../x",
    "new\nline",
    "\0",
    '"\\',
    "\U0001f9ee",
    "é" * 20,
    "\x7f",
    "\ud800",
)
_NUMBERS = (
    "-0",
    "-1",
    "1.0",
    "1e2",
    "0.5",
    "true",
    "null",
    "NaN",
    "Infinity",
    "01",
    "+1",
    "1e999",
    "9" * 25,
    "9" * 5000,
)
_SIZES = (0, 1, 2, 3, 7, 8, 255, 2**31, 2**32, 2**53, 2**61, 2**63, 2**64 - 1, 2**64, 2**70)
_VALUES = (
    "null",
    "[]",
    "{}",
    '""',
    '"F32"',
    "0",
    "[0,0]",
    '[["F32"]]',
    '{"F32":null}',
    '{"a":"b"}',
    "[[]]",
    "[" * 200 + "]" * 200,
)
_DTYPES = ("F8_E4M3FN", "f32", "F32 ", "", "FLOAT", "F8", "F6", "BF16\0")
_TOKENS = (
    b'"', b"{", b"}", b"[", b"]", b":", b",", b" ", b"\n", b"\0", b"\x0b", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf",
    b"\\u", b"\\ud800", b"-0", b"1e5",
)  # fmt: skip


class Object(list[tuple[str, Any]]):
    """A JSON object as pairs, so that a key can occur twice."""


class Literal(str):
    """A piece of JSON text that is written as it is."""


def make_file(random: Random) -> bytes:
    """A file: mostly nearly valid, sometimes valid, sometimes far from it."""
    header, data_size = _valid_header(random)
    for _ in range(random.choice((0, 0, 1, 1, 2, 3))):
        _mutate_tree(random, header)
    text = bytearray(_write(random, header).encode("utf-8", "surrogatepass"))
    for _ in range(random.choice((0, 0, 0, 1, 2))):
        _mutate_text(random, text)
    if random.randrange(12) == 0:
        data_size = max(0, data_size + random.choice((-8, -1, 1, 8)))
    return _prefix(random, len(text)) + bytes(text) + bytes(index % 251 for index in range(data_size))


def _valid_header(random: Random) -> tuple[Object, int]:
    header, position = Object(), 0
    for name in random.sample(_NAMES, random.randrange(4)):
        dtype = random.choice(tuple(DTYPES))
        shape = [random.choice((0, 1, 2, 3, 4, 8)) for _ in range(random.randrange(4))]
        if math.prod(shape) * DTYPES[dtype].bits % 8:
            shape.append(8)
        if random.randrange(40) == 0:
            shape[:0] = [1] * random.choice((60, 61, 64, 65, 1000))
        if 0 in shape and random.randrange(3) == 0:
            shape.insert(random.randrange(len(shape) + 1), random.choice((2**31, 2**63, 2**64 - 1)))
        size = math.prod(shape) * DTYPES[dtype].bits // 8
        entry = Object([("dtype", dtype), ("shape", shape), ("data_offsets", [position, position + size])])
        random.shuffle(entry)
        header.append((name, entry))
        position += size
    if random.randrange(3) == 0:
        header.append(("__metadata__", random.choice((Object(), Object([("format", "pt")]), Literal("null")))))
    random.shuffle(header)
    return header, position


def _mutate_tree(random: Random, header: Object) -> None:
    if not header or random.randrange(6) == 0:
        value = Literal(random.choice(_VALUES))
        header.append((random.choice((*_NAMES, "__metadata__")), value))
        return
    position = random.randrange(len(header))
    name, entry = header[position]
    if random.randrange(12) == 0:
        header.append((name, entry))
        return
    if not isinstance(entry, Object) or not entry or random.randrange(6) == 0:
        as_array: Any = [value for _, value in entry] if isinstance(entry, Object) else entry
        changed = random.choice((Literal(random.choice(_VALUES)), as_array))
        header[position] = (random.choice((name, random.choice(_NAMES))), changed)
    elif random.randrange(5) == 0:
        _mutate_fields(random, entry)
    else:
        field = random.randrange(len(entry))
        entry[field] = (entry[field][0], _mutate_value(random, entry[field][1]))


def _mutate_fields(random: Random, entry: Object) -> None:
    extra = random.choice(("extra", "dtype", "shape", "data_offsets", "\udc00"))
    random.choice((entry.pop, lambda: entry.append((extra, Literal(random.choice(_VALUES))))))()


def _mutate_value(random: Random, value: Any) -> Any:
    if isinstance(value, str):
        as_object = Object([(value, Literal("null"))])
        dtype = random.choice((*DTYPES, *_DTYPES))
        return random.choice((dtype, dtype, as_object, Literal(random.choice(_VALUES))))
    if not isinstance(value, list) or random.randrange(5) == 0:
        return Literal(random.choice(_VALUES))
    numbers = list(value)
    change = random.randrange(5)
    if change == 0 or not numbers:
        numbers.insert(random.randrange(len(numbers) + 1), random.choice(_SIZES))
    elif change == 1:
        numbers.pop(random.randrange(len(numbers)))
    elif change == 2:
        numbers.reverse()
    else:
        position = random.randrange(len(numbers))
        near = numbers[position] + random.choice((-8, -1, 1, 8)) if isinstance(numbers[position], int) else 0
        numbers[position] = random.choice((near, random.choice(_SIZES), Literal(random.choice(_NUMBERS))))
    return numbers


def _write(random: Random, value: Any) -> str:
    space = random.choice(("", "", "", " ", "\n\t"))
    if isinstance(value, Object):
        return (
            "{"
            + ("," + space).join(f"{_quote(random, key)}:{space}{_write(random, item)}" for key, item in value)
            + "}"
        )
    if isinstance(value, list):
        return "[" + ("," + space).join(_write(random, item) for item in value) + "]"
    if isinstance(value, Literal):
        return value
    return _quote(random, value) if isinstance(value, str) else str(value)


def _quote(random: Random, text: str) -> str:
    return json.dumps(text, ensure_ascii=random.randrange(2) == 0)


def _mutate_text(random: Random, text: bytearray) -> None:
    start = random.randrange(len(text) + 1)
    change = random.randrange(4)
    if change == 0:
        text[start:start] = random.choice(_TOKENS)
    elif change == 1:
        del text[start : start + random.choice((1, 2, 5, 50))]
    elif change == 2:
        text[start : start + 1] = bytes([random.randrange(256)])
    else:
        stop = random.randrange(len(text) + 1)
        text[start:start] = text[min(start, stop) : max(start, stop)]


def _prefix(random: Random, length: int) -> bytes:
    kind = random.randrange(36)
    if kind == 0:
        return random.randbytes(random.randrange(9))
    if kind == 1:
        length = random.choice((0, 1, 100_000_000, 100_000_001, 2**63, 2**64 - 1))
    elif kind == 2:
        length = max(0, length + random.choice((-8, -1, 1, 8)))
    return length.to_bytes(8, "little")
