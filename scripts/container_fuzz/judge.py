"""Reads one file with the project's reader and with the safetensors library, and compares what they say of it.

The library is the oracle: what it rejects must be rejected, and what it accepts must be accepted with the
same content unless one of the stated reasons holds, which are found here by other means than the reader's.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import safetensors

from deepinfer_prep.errors import ContainerError
from deepinfer_prep.files.container import MOST_DIMENSIONS, Header, encode_header, read_header

STATED_REASONS = (
    "a key occurs twice",
    "a tensor has fields beyond dtype, shape and data_offsets",
    "a tensor is a JSON array",
    "a dtype is a JSON object",
    "more than 64 dimensions",
)
"""Why the project's reader rejects files that the library accepts; docs/robustness.md gives the grounds."""

_FIELDS = {"dtype", "shape", "data_offsets"}


class DisagreementError(AssertionError):
    """The two readers do not agree, and no stated reason explains it."""


def judge(content: bytes) -> str:
    """What both readers say of a file: "accepted", "rejected" or one of `STATED_REASONS`.

    Raises:
        DisagreementError: they differ in anything else, an exception other than ContainerError included.
    """
    descriptor = os.memfd_create("fuzzed")
    try:
        os.write(descriptor, content)
        path = Path(f"/proc/self/fd/{descriptor}")
        return _compare(content, path, _read(path))
    finally:
        os.close(descriptor)


def _read(path: Path) -> Header | ContainerError:
    try:
        return read_header(path)
    except ContainerError as error:
        return error
    except Exception as error:
        raise DisagreementError(f"the reader crashed: {error!r}") from error


def _compare(content: bytes, path: Path, found: Header | ContainerError) -> str:
    try:
        expected = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        if isinstance(found, Header):
            raise DisagreementError(f"accepted, but the library rejects it: {error}") from error
        return "rejected"
    if isinstance(found, ContainerError):
        reason = stated_reason(content)
        if reason is None:
            raise DisagreementError(f"rejected, but the library accepts it: {found}")
        return reason
    _compare_content(content, expected, found)
    with safetensors.safe_open(path, "np") as file:
        if (file.metadata() or {}) != found.metadata:
            raise DisagreementError(f"metadata {found.metadata} where the library finds {file.metadata()}")
    _compare_rewritten(content, expected, found)
    return "accepted"


def _compare_content(content: bytes, expected: list[tuple[str, dict[str, Any]]], found: Header) -> None:
    actual = {
        tensor.name: {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data": content[found.data_start + tensor.start : found.data_start + tensor.end],
        }
        for tensor in found.tensors
    }
    wanted = {name: {**entry, "data": bytes(entry["data"])} for name, entry in expected}
    if actual != wanted:
        raise DisagreementError(f"read {actual} where the library reads {wanted}")


def _compare_rewritten(content: bytes, expected: list[tuple[str, dict[str, Any]]], found: Header) -> None:
    """A header written anew must give the library the same tensors."""
    rewritten = encode_header(found.tensors, found.metadata) + content[found.data_start :]
    again = safetensors.deserialize(rewritten)  # type: ignore[no-untyped-call]
    if sorted(again, key=lambda item: item[0]) != sorted(expected, key=lambda item: item[0]):
        raise DisagreementError(f"rewritten as {rewritten!r}, the library reads something else")


def stated_reason(content: bytes) -> str | None:
    """Which of the stated reasons a file that the library accepts is rejected for, if any."""
    length = int.from_bytes(content[:8], "little")
    twice = []

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.append(len({key for key, _ in pairs}) != len(pairs))
        return dict(pairs)

    header = json.loads(content[8 : 8 + length].decode(), object_pairs_hook=collect)
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    if any(twice):
        return STATED_REASONS[0]
    if any(isinstance(entry, dict) and entry.keys() - _FIELDS for entry in entries):
        return STATED_REASONS[1]
    if any(isinstance(entry, list) for entry in entries):
        return STATED_REASONS[2]
    if any(isinstance(entry, dict) and isinstance(entry["dtype"], dict) for entry in entries):
        return STATED_REASONS[3]
    if any(isinstance(entry, dict) and len(entry["shape"]) > MOST_DIMENSIONS for entry in entries):
        return STATED_REASONS[4]
    return None
