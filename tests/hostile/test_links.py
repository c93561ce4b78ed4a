"""Links in a checkpoint or an output that lead out of it: refused by name, and never read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from deepinfer_prep import convert_checkpoint, inspect_checkpoint, verify_checkpoint
from deepinfer_prep.cli.main import main
from deepinfer_prep.errors import ManifestError
from deepinfer_prep.files.untrusted import leads_out
from deepinfer_prep.runtime import PreparedCheckpoint
from tests.hostile.checkpoints import MANIFEST, write_checkpoint
from tests.raises import raises_code
from tests.small_files import tree


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    folder = tmp_path / ".ssh"
    folder.mkdir()
    (folder / "id_ed25519").write_text("secret")
    (folder / "id_ed25519").chmod(0o600)
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source")


def link_a_file(source: Path, secret: Path) -> None:
    (source / "notes.txt").symlink_to(secret / "id_ed25519")


def link_a_folder(source: Path, secret: Path) -> None:
    (source / "assets").symlink_to(secret)


def link_through_a_link(source: Path, secret: Path) -> None:
    (source / "first").symlink_to("second")
    (source / "second").symlink_to(secret / "id_ed25519")


def link_in_a_folder(source: Path, secret: Path) -> None:
    (source / "inference" / "key").symlink_to(f"../../{secret.name}/id_ed25519")


def link_the_config(source: Path, secret: Path) -> None:
    (source / "config.json").rename(secret / "config.json")
    (source / "config.json").symlink_to(secret / "config.json")


def link_the_index(source: Path, secret: Path) -> None:
    name = "model.safetensors.index.json"
    (source / name).rename(secret / name)
    (source / name).symlink_to(secret / name)


def link_a_shard(source: Path, secret: Path) -> None:
    (source / "model-1.safetensors").rename(secret / "blob")
    (source / "model-1.safetensors").symlink_to(secret / "blob")


LINKS = [
    link_a_file,
    link_a_folder,
    link_through_a_link,
    link_in_a_folder,
    link_the_config,
    link_the_index,
    link_a_shard,
]


@pytest.mark.parametrize("link", LINKS)
def test_a_link_out_of_the_checkpoint_is_refused_unless_it_is_asked_for(
    checkpoint: Path, secret: Path, tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    link(checkpoint, secret)
    with raises_code("link-out"):
        convert_checkpoint(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    convert_checkpoint(checkpoint, tmp_path / "out", follow_links=True)
    assert verify_checkpoint(tmp_path / "out", source=checkpoint, follow_links=True).ok
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file() and path.read_bytes() == b"secret":
            assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("link", LINKS)
def test_a_report_follows_links_as_a_conversion_does(
    checkpoint: Path, secret: Path, tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    link(checkpoint, secret)
    command = ["report", str(checkpoint), "--json", "--headers-only", "--quiet"]
    assert CliRunner().invoke(main, command).exit_code == 1
    assert CliRunner().invoke(main, [*command, "--follow-links"]).exit_code == 0


@pytest.mark.parametrize("target", ["/proc/self/environ", "/proc/version", "/sys/kernel/uevent_seqnum"])
def test_what_the_system_makes_up_is_no_file(checkpoint: Path, tmp_path: Path, target: str) -> None:
    if not os.path.exists(target):
        pytest.skip(f"no {target} here")
    (checkpoint / "notes.txt").symlink_to(target)
    with raises_code("link-out"):
        convert_checkpoint(checkpoint, tmp_path / "out", follow_links=True)


def test_links_inside_the_checkpoint_are_followed(checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "again.json").symlink_to("config.json")
    (checkpoint / "also").symlink_to("inference")
    convert_checkpoint(checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / "again.json").read_bytes() == (checkpoint / "config.json").read_bytes()
    assert (tmp_path / "out" / "also" / "model.py").is_file()


def test_a_checkpoint_that_is_itself_a_link_is_read(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(checkpoint)
    assert inspect_checkpoint(tmp_path / "link").shards == 2


def test_a_cache_may_link_only_into_its_own_blobs(checkpoint: Path, secret: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "1").write_text("x")
    (snapshot / "good").symlink_to("../../blobs/1")
    (snapshot / "bad").symlink_to("../../../.ssh/id_ed25519")
    (snapshot / "worse").symlink_to("../../blobs/../../.ssh/id_ed25519")
    assert not leads_out(snapshot, snapshot / "good")
    assert leads_out(snapshot, snapshot / "bad")
    assert leads_out(snapshot, snapshot / "worse")


@pytest.mark.parametrize("name", ["model-1.safetensors", "inference", "neuron/neuron-00001-of-00001.safetensors"])
def test_an_output_is_not_read_through_links(checkpoint: Path, tmp_path: Path, name: str) -> None:
    output, outside = tmp_path / "out", tmp_path / "outside"
    convert_checkpoint(checkpoint, output)
    (output / name).rename(outside)
    (output / name).symlink_to(outside)
    result = verify_checkpoint(output)
    assert any("is a link that leads out of the folder" in str(difference) for difference in result.first)
    if name != "inference":
        with pytest.raises(ManifestError, match="is a link that leads out of the folder"):
            PreparedCheckpoint(output)


def test_a_manifest_that_is_a_link_is_refused_like_any_other(checkpoint: Path, secret: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    convert_checkpoint(checkpoint, output)
    before = tree(secret)
    (output / MANIFEST).rename(secret / "manifest")
    (output / MANIFEST).symlink_to(secret / "manifest")
    with pytest.raises(ManifestError):
        verify_checkpoint(output)
    (secret / "manifest").unlink()
    assert tree(secret) == before
