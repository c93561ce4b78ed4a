"""The fingerprint of a checkpoint changes with whatever makes it another one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_prep import Options
from deepinfer_prep.files.checkpoint import open_checkpoint
from deepinfer_prep.planning.plan import plan_conversion
from tests.small_files import SCALE, WEIGHT, write_config, write_file


def fingerprint(folder: Path) -> str:
    return plan_conversion(open_checkpoint(folder), Options()).fingerprint


def write(folder: Path) -> Path:
    write_file(folder / "model.safetensors", {"a.weight": WEIGHT, "a.scale": SCALE})
    write_config(folder, quant_method="fp8")
    (folder / "notes.txt").write_text("12345")
    return folder


def rename_a_tensor(folder: Path) -> None:
    write_file(folder / "model.safetensors", {"b.weight": WEIGHT, "b.scale": SCALE})


def rename_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")


def rename_a_file(folder: Path) -> None:
    (folder / "notes.txt").rename(folder / "nodes.txt")


def lengthen_a_file(folder: Path) -> None:
    (folder / "notes.txt").write_text("123456")


def add_a_file(folder: Path) -> None:
    (folder / "empty.txt").touch()


@pytest.mark.parametrize("change", [rename_a_tensor, rename_a_shard, rename_a_file, lengthen_a_file, add_a_file])
def test_another_checkpoint_has_another_fingerprint(tmp_path: Path, change: Callable[[Path], None]) -> None:
    one, other = write(tmp_path / "one"), write(tmp_path / "other")
    assert fingerprint(one) == fingerprint(other)
    change(other)
    assert fingerprint(one) != fingerprint(other)
