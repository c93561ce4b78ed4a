"""Disks that fill up, limits of the system, and files larger than memory."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from deepinfer_prep import verify_checkpoint
from tests.hostile.checkpoints import WORKSPACE, convert, published
from tests.small_files import SCALE, WEIGHT, tree, write_file

COMMAND = (sys.executable, "-m", "deepinfer_prep")


def run_limited(
    arguments: Iterable[object], *limits: tuple[int, int], command: tuple[str, ...] = COMMAND
) -> subprocess.CompletedProcess[str]:
    """Run the command under limits of the system."""

    def limit() -> None:
        for kind, amount in limits:
            resource.setrlimit(kind, (amount, amount))

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *map(str, arguments)],
        preexec_fn=limit,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def many_weights(folder: Path) -> Path:
    tensors = {f"l{number}.weight": WEIGHT for number in range(64)} | {
        f"l{number}.scale": SCALE for number in range(64)
    }
    write_file(folder / "model.safetensors", tensors)
    return folder


def test_a_limit_of_file_sizes_ends_clearly_and_resumes(tmp_path: Path) -> None:
    source, output = many_weights(tmp_path / "source"), tmp_path / "out"
    ended = run_limited(("convert", source, output, "--quiet"), (resource.RLIMIT_FSIZE, 64 * 1024))
    assert ended.returncode == 1
    assert f"error: File too large [EFBIG]: {output}" in ended.stderr
    assert "Run the same command again to resume" in ended.stderr
    assert published(output) == {}
    assert convert(source, output).exit_code == 0
    assert verify_checkpoint(output, source=source).ok


ON_A_SMALL_DISK = """
import subprocess, sys
from pathlib import Path
from deepinfer_prep.writing import local_target
from deepinfer_prep.cli import main

source, disk = sys.argv[1], sys.argv[2]
mount = ["mount", "-t", "tmpfs", "-o", "size=160k", "none", disk]
subprocess.run(mount, check=True)

def convert():
    try:
        main(["convert", source, disk + "/out", "--quiet"])
    except SystemExit as ended:
        return ended.code

print(convert(), file=sys.stderr)                                   # refused: the space is known beforehand
known, local_target.check_space = local_target.check_space, lambda *arguments: None
print(convert(), file=sys.stderr)                                   # as if another program filled the disk meanwhile
print(sorted(path.name for path in Path(disk, "out").iterdir()), file=sys.stderr)
local_target.check_space = known
subprocess.run(["mount", "-o", "remount,size=4m", disk], check=True)
print(convert(), file=sys.stderr)
main(["verify", disk + "/out", "--source", source, "--quiet"])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount")
def test_a_disk_that_is_full(tmp_path: Path) -> None:
    source, disk = many_weights(tmp_path / "source"), tmp_path / "disk"
    disk.mkdir()
    ended = run_limited((source, disk), command=("unshare", "-m", sys.executable, "-c", ON_A_SMALL_DISK))
    if "permission denied" in ended.stderr.lower() or "not permitted" in ended.stderr:
        pytest.skip("mounting is not permitted here")
    first, status, error, again, names, last = ended.stderr.splitlines()
    assert "bytes free. Free some space or choose another output" in first
    assert f"No space left on device [ENOSPC]: {disk}/out/{WORKSPACE}/" in error
    assert (status, again, names, last) == ("1", "1", f"['{WORKSPACE}']", "0")
    assert ended.stdout.endswith("verified: no difference\n")


def test_few_file_descriptors_are_enough_for_many_files(tmp_path: Path) -> None:
    source, output = many_weights(tmp_path / "source"), tmp_path / "out"
    for number in range(300):
        path = source / "extra" / str(number % 7) / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(number))
    ended = run_limited(("convert", source, output, "--quiet", "--workers", "8"), (resource.RLIMIT_NOFILE, 128))
    assert ended.returncode == 0, ended.stderr
    assert {name: data for name, data in tree(output).items() if name.startswith("extra/")} == {
        name: data for name, data in tree(source).items() if name.startswith("extra/")
    }


def test_more_shards_than_descriptors_are_converted(tmp_path: Path) -> None:
    for number in range(120):
        name = f"model-{number + 1:05}-of-00120.safetensors"
        write_file(tmp_path / "source" / name, {f"l{number}.weight": WEIGHT, f"l{number}.scale": SCALE})
    arguments = ("convert", tmp_path / "source", tmp_path / "out", "--quiet", "--workers", "8")
    ended = run_limited(arguments, (resource.RLIMIT_NOFILE, 64))
    assert ended.returncode == 0, ended.stderr
    assert verify_checkpoint(tmp_path / "out", source=tmp_path / "source").ok


MEASURED = """
import sys
import deepinfer_prep.cli
try:
    deepinfer_prep.cli.main.main(sys.argv[1:])
finally:
    peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print("peak", int(peak.split()[1]) // 1024, file=sys.stderr)
"""
"""The command, and then the peak of its memory in MiB."""


def sparse_checkpoint(folder: Path, rows: int) -> int:
    """One weight of rows x 64 codes with a scale a row and 32 columns; only the last row is not zero."""
    size, scale = rows * 64, rows * 2
    header = json.dumps(
        {
            "t.weight": {"dtype": "F8_E4M3", "shape": [rows, 64], "data_offsets": [0, size]},
            "t.scale": {"dtype": "F8_E8M0", "shape": [rows, 2], "data_offsets": [size, size + scale]},
        }
    ).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size + scale)
        file.seek(8 + len(header) + size - 64)
        file.write(bytes([0x7E]) * 64)
        file.seek(8 + len(header) + size + scale - 2)
        file.write(bytes([127, 126]))
    return size


def test_a_tensor_of_more_than_2_to_the_31_elements_takes_a_few_chunks_of_memory(scratch: Path, tmp_path: Path) -> None:
    """With address space for less than the file, so that a whole-file mapping would fail."""
    rows = 2**25 + 1
    roomy = [folder for folder in (scratch, tmp_path) if shutil.disk_usage(folder).free > 6 * 2**30]
    if not roomy:
        pytest.skip("needs 6 GiB of free space")
    source, output = roomy[0] / "source", roomy[0] / "out"
    size = sparse_checkpoint(source, rows)
    assert size > 2**31
    limit = (resource.RLIMIT_AS, size - 1)
    command = (sys.executable, "-c", MEASURED)
    ended = run_limited(("convert", source, output, "--quiet", "--workers", "16"), limit, command=command)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stderr.rpartition("peak ")[2]) < 250
    with (output / "model.safetensors").open("rb") as file:
        file.seek(-(rows * 2 + 128), os.SEEK_END)
        assert file.read(128) == bytes(64) + bytes([0x76]) * 64
        assert file.read(2) == bytes([1, 1])
        file.seek(-4, os.SEEK_END)
        assert file.read() == bytes([1, 1, 128, 127])
