"""Faults that people reported of tools like this one, each with a small input and the behaviour that is right."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from deepinfer_prep import verify_checkpoint
from tests.hostile.checkpoints import MANIFEST, WORKSPACE, convert, published
from tests.small_files import ONE_F32, SCALE, WEIGHT, tree, write_file, write_index

PAIR = {"l.weight": WEIGHT, "l.scale": SCALE}


def refuse(source: Path, output: Path, *options: str) -> str:
    """Convert in vain; nothing may have been written."""
    before = tree(output) if output.exists() else None
    result = convert(source, output, *options)
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr
    assert (tree(output) if output.exists() else None) == before
    return result.stderr


def indexed(folder: Path, **more: str) -> Path:
    write_file(folder / "a.safetensors", PAIR)
    write_index(folder, {"l.weight": "a.safetensors", "l.scale": "a.safetensors", **more})
    return folder


def test_the_index_names_a_missing_shard(tmp_path: Path) -> None:
    source = indexed(tmp_path / "source", m="b.safetensors")
    assert (
        "b.safetensors (1 tensor); 1 of 2 shards present. The download is not complete: "
        "fetch the missing files." in refuse(source, tmp_path / "out")
    )


def test_the_index_names_a_tensor_that_the_shard_does_not_hold(tmp_path: Path) -> None:
    source = indexed(tmp_path / "source", **{"gone.weight": "a.safetensors"})
    assert "names 1 tensor that the named shards do not hold: 'gone.weight' (a.safetensors)" in refuse(
        source, tmp_path / "out"
    )


def test_a_shard_holds_a_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    source = indexed(tmp_path / "source")
    write_file(source / "a.safetensors", {**PAIR, "extra.weight": WEIGHT})
    assert "does not name 1 tensor that the shards hold: 'extra.weight' (a.safetensors)" in refuse(
        source, tmp_path / "out"
    )


def test_a_tensor_lies_in_an_unreferenced_file_as_well(tmp_path: Path) -> None:
    source, output = indexed(tmp_path / "source"), tmp_path / "out"
    write_file(source / "b.safetensors", {"l.weight": WEIGHT})
    result = convert(source, output)
    assert result.exit_code == 0
    assert "b.safetensors is not copied: the index does not name it" in result.stdout
    assert set(tree(output)) == {"a.safetensors", "model.safetensors.index.json", MANIFEST}
    (source / "model.safetensors.index.json").unlink()
    assert "tensor 'l.weight' is in two files" in refuse(source, tmp_path / "other")


def test_stale_shards_lie_in_the_output(tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "out"
    write_file(source / "model.safetensors", PAIR)
    write_file(output / "model-00009-of-00009.safetensors", {"old": WEIGHT})
    write_index(output, {"old": "model-00009-of-00009.safetensors"})
    assert "is not empty: it holds model-00009-of-00009.safetensors" in refuse(source, output)
    assert convert(source, output, "--overwrite").exit_code == 0
    assert set(tree(output)) == {"model.safetensors", MANIFEST}
    assert "already holds a finished output" in refuse(source, output)


@pytest.mark.parametrize(("change", "message"), [(-7, "7 bytes missing"), (7, "7 bytes too many")])
def test_a_shard_is_cut_or_too_long(tmp_path: Path, change: int, message: str) -> None:
    path = write_file(tmp_path / "source" / "model.safetensors", PAIR)
    size = path.stat().st_size
    os.truncate(path, size + change)
    assert f"{path}: expected {size:,} bytes, found {size + change:,}: {message}" in refuse(
        tmp_path / "source", tmp_path / "out"
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5\n", "Git LFS pointer"),
        (b"<html><body>Access denied</body></html>", "HTML or XML page"),
        (b"", "0 bytes long, too short"),
        (b"\0" * 100_000, "begins with zeros"),
    ],
    ids=["LFS pointer", "HTML", "empty", "zeros"],
)
def test_a_shard_is_no_shard_at_all(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "model.safetensors").write_bytes(content)
    assert message in refuse(tmp_path / "source", tmp_path / "out")


def test_empty_tensors_and_scalars_pass_through(tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "out"
    tensors = {"a.weight": ("F8_E4M3", (0, 64), b""), "a.scale": ("F8_E8M0", (0, 2), b""), "s": ("F32", (), ONE_F32)}
    write_file(source / "model.safetensors", tensors)
    (source / "empty.txt").write_bytes(b"")
    result = convert(source, output, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["tensors"] == 3
    assert (output / "model.safetensors").read_bytes()[-4:] == ONE_F32
    assert (output / "empty.txt").read_bytes() == b""
    assert verify_checkpoint(output, source=source).ok


def test_nothing_but_empty_tensors(tmp_path: Path) -> None:
    write_file(tmp_path / "source" / "model.safetensors", {"a.weight": ("F8_E4M3", (0, 64), b""), "a.scale": SCALE})
    write_file(tmp_path / "none" / "model.safetensors", {})
    for name in ("source", "none"):
        assert convert(tmp_path / name, tmp_path / f"{name} out").exit_code == 0
        assert verify_checkpoint(tmp_path / f"{name} out", source=tmp_path / name).ok


NAMES = ["new\nline", "../../x", "/etc/passwd", "\U0001f9ee", "nul\0", 'quote"\\', "x" * 5000, "a b", "__metadata"]


def test_tensors_may_have_any_name(tmp_path: Path) -> None:
    """A name never becomes a path, and no output, report or message stumbles over it."""
    source, output = tmp_path / "source", tmp_path / "out"
    tensors = {f"{name}.weight": WEIGHT for name in NAMES} | {f"{name}.scale": SCALE for name in NAMES}
    tensors |= {f"{name}.hc_attn_fn": ("F32", (24, 8), 1) for name in NAMES} | {"": ("BF16", (3,), 1)}
    write_file(source / "model.safetensors", tensors)
    before = set(tmp_path.parent.rglob("*"))
    result = convert(source, output, "--report", str(tmp_path / "report.json"))
    assert result.exit_code == 0, result.stderr
    new = {path for path in set(tmp_path.parent.rglob("*")) - before if output not in path.parents}
    assert new == {output, tmp_path / "report.json"}
    assert verify_checkpoint(output, source=source).ok
    manifest = json.loads((output / MANIFEST).read_text())
    assert set(manifest["weights"]) == {f"{name}.weight" for name in NAMES}
    assert set(manifest["split"]) == {f"{name}.hc_attn_fn" for name in NAMES}


def test_unusual_names_are_shown_in_refusals(tmp_path: Path) -> None:
    write_file(tmp_path / "source" / "model.safetensors", {f"{name}.weight": WEIGHT for name in NAMES[:7]})
    message = refuse(tmp_path / "source", tmp_path / "out")
    assert "'new\\nline.weight'" in message
    assert "\0" not in message


def test_a_foreign_file_in_an_unfinished_output_is_not_lost(tmp_path: Path) -> None:
    """Only what a publication has already named may lie beside an unfinished run."""
    source, output = indexed(tmp_path / "source"), tmp_path / "out"
    (output / WORKSPACE).mkdir(parents=True)
    (output / "config.json").write_text("mine")
    (source / "config.json").write_text("{}")
    assert "is not empty: it holds config.json" in refuse(source, output)
    assert published(output) == {"config.json": b"mine"}


def test_the_fiftieth_scale_is_missed_before_anything_is_written(tmp_path: Path) -> None:
    tensors = {f"l{number}.weight": WEIGHT for number in range(50)} | {
        f"l{number}.scale": SCALE for number in range(49)
    }
    write_file(tmp_path / "source" / "a.safetensors", tensors)
    assert "F8_E4M3 tensors that have no scale (1): 'l49.weight'" in refuse(tmp_path / "source", tmp_path / "out")
