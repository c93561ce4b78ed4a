"""Putting a checkpoint together from index, shards and other files, complete or not."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from deepinfer_prep.errors import ContainerError, PrepError
from deepinfer_prep.files.checkpoint import open_checkpoint
from deepinfer_prep.files.storage import FileState
from tests.raises import raises_code
from tests.small_files import SCALE, WEIGHT, write_config, write_file, write_index

PAIR = {"l.weight": WEIGHT, "l.scale": SCALE}
INDEX = "model.safetensors.index.json"


def refuse(folder: Path) -> str:
    with pytest.raises(PrepError) as caught:
        open_checkpoint(folder)
    return str(caught.value)


def indexed(folder: Path, **more: str) -> Path:
    """One shard, a.safetensors, with a weight and its scale; `more` are further index entries."""
    write_file(folder / "a.safetensors", PAIR)
    write_index(folder, {"l.weight": "a.safetensors", "l.scale": "a.safetensors", **more}, 4100)
    return folder


def test_tensors_keep_their_shard_and_place(tmp_path: Path) -> None:
    write_file(tmp_path / "b.safetensors", {"l.weight": WEIGHT})
    write_file(tmp_path / "a.safetensors", {"l.scale": SCALE, "s": ("F32", (), bytes(4))})
    write_index(tmp_path, {"l.weight": "b.safetensors", "l.scale": "a.safetensors", "s": "a.safetensors"}, 4104)
    checkpoint = open_checkpoint(tmp_path)
    assert [shard.name for shard in checkpoint.shards] == ["a.safetensors", "b.safetensors"]
    assert {name: checkpoint.shards[n].name for name, n in checkpoint.shard_of.items()} == {
        "l.weight": "b.safetensors",
        "l.scale": "a.safetensors",
        "s": "a.safetensors",
    }
    assert checkpoint.tensors["s"].start == 4
    assert checkpoint.where("s") == f"{tmp_path / 'a.safetensors'}: tensor 's'"
    assert checkpoint.warnings == ()


def test_a_missing_shard_is_named_with_how_many_tensors_it_holds(tmp_path: Path) -> None:
    message = refuse(indexed(tmp_path, m="b.safetensors", n="c.safetensors", o="c.safetensors"))
    assert "b.safetensors (1 tensor)" in message
    assert "c.safetensors (2 tensors); 1 of 3 shards present" in message
    assert "fetch the missing files" in message


def test_a_link_to_itself_is_a_missing_shard(tmp_path: Path) -> None:
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    assert "(1 tensor); 1 of 2 shards present" in refuse(indexed(tmp_path, m="loop.safetensors"))


def test_a_shard_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    assert "holds half a surrogate pair" in refuse(indexed(tmp_path, m="\ud800.safetensors"))


def test_a_broken_link_is_a_missing_shard(tmp_path: Path) -> None:
    (tmp_path / "b.safetensors").symlink_to("../blobs/0123")
    assert "b.safetensors (1 tensor)" in refuse(indexed(tmp_path, m="b.safetensors"))


def test_index_entries_that_no_shard_holds_are_listed(tmp_path: Path) -> None:
    gone = {f"gone.{number}": "a.safetensors" for number in range(12)}
    message = refuse(indexed(tmp_path, **gone))
    assert "names 12 tensors that the named shards do not hold: 'gone.0' (a.safetensors), " in message
    assert message.count("gone.") == 10
    assert "and 2 more" in message


def test_an_index_that_names_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "b.safetensors", {"m": WEIGHT, "n": WEIGHT})
    message = refuse(indexed(tmp_path, m="a.safetensors", n="b.safetensors"))
    assert "names 1 tensor that the named shards do not hold: 'm' (a.safetensors)" in message


def test_tensors_that_the_index_does_not_name_are_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", {**PAIR, "extra.weight": WEIGHT})
    write_index(tmp_path, {"l.weight": "a.safetensors", "l.scale": "a.safetensors"})
    message = refuse(tmp_path)
    assert "does not name 1 tensor that the shards hold: 'extra.weight' (a.safetensors)" in message


def test_a_file_beside_the_index_is_left_out_and_told(tmp_path: Path) -> None:
    indexed(tmp_path)
    write_file(tmp_path / "consolidated.safetensors", PAIR)
    checkpoint = open_checkpoint(tmp_path)
    assert [shard.name for shard in checkpoint.shards] == ["a.safetensors"]
    assert [other.name for other in checkpoint.others] == [INDEX]
    assert checkpoint.warnings == (
        "consolidated.safetensors is not copied: the index does not name it, and it holds fp8 that is not converted, "
        "which must not lie beside converted shards; convert it by itself if anybody needs it.",
    )


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", PAIR)
    write_file(tmp_path / "b.safetensors", {"l.weight": WEIGHT})
    message = refuse(tmp_path)
    assert "tensor 'l.weight' is in two files" in message
    assert "a.safetensors" in message
    assert "b.safetensors" in message


def test_without_an_index_all_files_of_the_folder_count(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", {"l.weight": WEIGHT})
    write_file(tmp_path / "b.safetensors", {"l.scale": SCALE})
    assert set(open_checkpoint(tmp_path).tensors) == {"l.weight", "l.scale"}


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", "..", ".", "", "a\0b", "a\\b"]
)
def test_an_index_may_name_only_plain_files(tmp_path: Path, name: str) -> None:
    write_file(tmp_path.parent / "a.safetensors", PAIR)
    assert "may name only plain files in its own folder that end in .safetensors" in refuse(indexed(tmp_path, m=name))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[]", "is not a JSON object"),
        ("[" * 100_000, "is not valid JSON"),
        ("{}", "has no `weight_map`"),
        ('{"weight_map": []}', "has no `weight_map`"),
        ('{"weight_map": {"a": 1}}', "has no `weight_map`"),
        ('{"weight_map": {"a": null}}', "has no `weight_map`"),
        ("version https://git-lfs.github.com/spec/v1\n", "is not valid JSON"),
    ],
)
def test_a_broken_index_is_named(tmp_path: Path, text: str, message: str) -> None:
    indexed(tmp_path)
    (tmp_path / INDEX).write_text(text)
    assert refuse(tmp_path).startswith(f"{tmp_path / INDEX} {message}")


def test_two_indexes_and_none_preferred(tmp_path: Path) -> None:
    indexed(tmp_path)
    (tmp_path / INDEX).rename(tmp_path / "x.safetensors.index.json")
    assert open_checkpoint(tmp_path).shards
    (tmp_path / "y.safetensors.index.json").write_text("{}")
    message = refuse(tmp_path)
    assert "x.safetensors.index.json, y.safetensors.index.json" in message
    (tmp_path / "x.safetensors.index.json").rename(tmp_path / INDEX)
    assert [other.name for other in open_checkpoint(tmp_path).others] == [INDEX, "y.safetensors.index.json"]


@pytest.mark.parametrize(
    ("stated", "warns"), [(4100, False), ("4100", False), (None, False), (4099, True), ("x", True)]
)
def test_the_total_size_of_an_index_is_advice(tmp_path: Path, stated: object, warns: bool) -> None:
    indexed(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["metadata"] = {"total_size": stated}
    (tmp_path / INDEX).write_text(json.dumps(index))
    warnings = open_checkpoint(tmp_path).warnings
    assert bool(warnings) == warns
    assert not warns or "the tensors take 4,100 bytes" in warnings[0]


@pytest.mark.parametrize("metadata", [{}, None, [], "absent"])
def test_an_index_needs_no_metadata(tmp_path: Path, metadata: object) -> None:
    indexed(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["metadata"] = metadata
    if metadata == "absent":
        del index["metadata"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert open_checkpoint(tmp_path).warnings == ()


@pytest.mark.parametrize("text", ["", "[1]", "{'a': 1}", "\xff"])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    indexed(tmp_path)
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    assert refuse(tmp_path).startswith(f"{tmp_path / 'config.json'} is not ")


def test_what_is_no_folder_and_no_file(tmp_path: Path) -> None:
    assert "does not exist" in refuse(tmp_path / "nosuch")
    (tmp_path / "empty").mkdir()
    assert "holds no .safetensors file" in refuse(tmp_path / "empty")
    (tmp_path / "text").write_text("hello, this is no checkpoint")
    with pytest.raises(ContainerError, match="text is not a safetensors file"):
        open_checkpoint(tmp_path / "text")


def test_a_folder_named_like_a_shard_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors" / "inner.safetensors", PAIR)
    assert "model.safetensors is a folder, where a file was expected" in refuse(tmp_path)
    (tmp_path / "named").mkdir()
    indexed(tmp_path / "named", m="b.safetensors")
    (tmp_path / "named" / "b.safetensors").mkdir()
    assert "b.safetensors is a folder, where a file was expected" in refuse(tmp_path / "named")


def test_a_folder_named_like_an_index_is_no_index(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", PAIR)
    (tmp_path / INDEX).mkdir()
    assert len(open_checkpoint(tmp_path).tensors) == 2


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_shard_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    assert "model.safetensors is a pipe or device, where a file was expected" in refuse(tmp_path)


@pytest.mark.timeout(20)
def test_other_things_that_are_no_files_are_left_out_and_told(tmp_path: Path) -> None:
    indexed(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    checkpoint = open_checkpoint(tmp_path)
    assert [other.name for other in checkpoint.others] == [INDEX]
    assert checkpoint.warnings == tuple(
        f"{name} is not copied: it is a pipe, socket or device." for name in ("pipe", "zero")
    )


def test_folders_are_copied_but_not_those_of_tools(tmp_path: Path) -> None:
    indexed(tmp_path)
    for name in ("inference/model.py", "assets/deep/er/logo.png", "empty.txt", ".gitattributes"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "inference" / ".git").write_text("gitdir: ../.git/modules/inference")
    for name in (".git/HEAD", ".cache/huggingface/x.incomplete", "__pycache__/m.pyc", "inference/__pycache__/m.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [other.name for other in open_checkpoint(tmp_path).others]
    assert names == sorted([INDEX, "inference/model.py", "assets/deep/er/logo.png", "empty.txt", ".gitattributes"])


def test_what_unfinished_downloads_leave_is_told(tmp_path: Path) -> None:
    indexed(tmp_path)
    (tmp_path / "tokenizer.json.incomplete").write_text("x")
    (tmp_path / "original").mkdir()
    write_file(tmp_path / "original" / "consolidated.safetensors", PAIR)
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(100))
    warnings = open_checkpoint(tmp_path).warnings
    assert "original/consolidated.safetensors is not copied" in warnings[0]
    assert "tokenizer.json.incomplete is not copied: it is what an unfinished download leaves." in warnings[1]
    assert "1 files that may hold a second copy of the weights" in warnings[2]


def test_a_shard_whose_download_goes_on_is_refused(tmp_path: Path) -> None:
    (indexed(tmp_path) / "a.safetensors.aria2").write_bytes(b"control")
    assert "a.safetensors.aria2 says that the download of a.safetensors beside it is not finished" in refuse(tmp_path)


def test_a_broken_link_among_the_other_files_is_refused(tmp_path: Path) -> None:
    (indexed(tmp_path) / "tokenizer.json").symlink_to("../../blobs/gone")
    assert "tokenizer.json is a link to a file that is not there" in refuse(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "self").symlink_to("self")
    assert "self is a link to a file that is not there" in refuse(tmp_path)


@pytest.mark.timeout(20)
def test_links_between_folders_neither_loop_nor_multiply(tmp_path: Path) -> None:
    source = indexed(tmp_path / "source")
    (source / "up").symlink_to(".")
    (source / "down").mkdir()
    (source / "down" / "up").symlink_to("..")
    (tmp_path / "shared" / "deep").mkdir(parents=True)
    (tmp_path / "shared" / "deep" / "x.txt").write_text("x")
    (source / "one").symlink_to("../shared")
    (source / "two").symlink_to("../shared")
    names = [other.name for other in open_checkpoint(source, follow_links=True).others]
    assert names == [INDEX, "one/deep/x.txt", "two/deep/x.txt"]
    previous = tmp_path / "shared"
    for level in range(30):
        folder = tmp_path / f"level{level}"
        folder.mkdir()
        (folder / "left").symlink_to(previous)
        (folder / "right").symlink_to(previous)
        previous = folder
    (source / "bomb").symlink_to(previous)
    with raises_code("link-in-link"):
        open_checkpoint(source, follow_links=True)


@pytest.mark.parametrize("name", ["new\nline.txt", "\U0001f9ee.txt", "-rf", "a b\tc", "x" * 255])
def test_other_files_may_have_any_name_that_is_text(tmp_path: Path, name: str) -> None:
    (indexed(tmp_path) / name).write_text("x")
    assert name in [other.name for other in open_checkpoint(tmp_path).others]


def test_a_file_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    indexed(tmp_path)
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")).write_text("x")
    assert re.search(r"name is not valid UTF-8, 'caf\\udce9\.txt'", refuse(tmp_path))
    shard = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.safetensors"))
    write_file(shard, PAIR)
    assert re.search(r"name is not valid UTF-8, 'caf\\udce9\.safetensors'", refuse(shard))


def test_folders_without_end_are_refused(tmp_path: Path) -> None:
    folder = indexed(tmp_path)
    for _ in range(60):
        folder /= "d"
    folder.mkdir(parents=True)
    (folder / "x.txt").write_text("x")
    assert "d/" * 60 + "x.txt" in [other.name for other in open_checkpoint(tmp_path).others]
    (folder / "e" / "e" / "e" / "e" / "e").mkdir(parents=True)
    assert "lies more than 64 folders deep" in refuse(tmp_path)


def test_an_unfinished_output_is_no_checkpoint(tmp_path: Path) -> None:
    indexed(tmp_path)
    (tmp_path / ".deepinfer-prep").mkdir()
    assert [other.name for other in open_checkpoint(tmp_path).others] == [INDEX]
    (tmp_path / ".deepinfer-prep" / "journal").write_text("{}\n")
    with raises_code("unfinished-run"):
        open_checkpoint(tmp_path)


def test_one_file_through_a_link_keeps_the_name_of_the_link(tmp_path: Path) -> None:
    write_file(tmp_path / "blobs" / "0123abcd", PAIR)
    snapshot = tmp_path / "snapshots" / "4567cdef"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123abcd")
    for path in (snapshot, snapshot / "model.safetensors"):
        (shard,) = open_checkpoint(path).shards
        assert shard.name == "model.safetensors"
        assert shard.state == FileState.of(tmp_path / "blobs" / "0123abcd")


def test_pointers_to_files_that_were_not_downloaded_are_told(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 5\n"
    (indexed(tmp_path) / "tokenizer.model").write_text(pointer)
    (tmp_path / "README.md").write_text("version https is not a pointer")
    (warning,) = open_checkpoint(tmp_path).warnings
    assert warning.startswith("1 files are Git LFS pointers and are copied as such, tokenizer.model among them")
    (tmp_path / "a.safetensors").write_text(pointer)
    assert "a.safetensors is a Git LFS pointer: the real file was not downloaded" in refuse(tmp_path)


def test_one_file_takes_the_config_beside_it(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"l.weight": WEIGHT, "l.weight_scale_inv": ("U8", (64, 2), 127)})
    write_config(tmp_path, quant_method="fp8", weight_block_size=[1, 32], scale_fmt="ue8m0")
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    assert checkpoint.config["quantization_config"]["scale_fmt"] == "ue8m0"
    assert checkpoint.others == ()
