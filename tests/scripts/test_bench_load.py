"""The loading benchmark: its ways give the same tensors, and it reports what it measured."""

from __future__ import annotations

from pathlib import Path

import bench_load
import pytest
import torch
from click.testing import CliRunner
from load_contenders import Contender, UnavailableError, contenders

from deepinfer_prep.convert import convert_checkpoint
from deepinfer_prep.runtime import PreparedCheckpoint

WAYS = {way.name: way for way in contenders()}


@pytest.fixture(scope="module")
def output(sample: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "output"
    convert_checkpoint(sample, folder)
    return folder


def contents(tensors: list[torch.Tensor]) -> list[tuple[str, tuple[int, ...], bytes]]:
    flat = (tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return sorted(zip((str(one.dtype) for one in tensors), (tuple(one.shape) for one in tensors), flat, strict=True))


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_every_way_gives_the_prepared_tensors(way: Contender, output: Path, sample: Path) -> None:
    try:
        tensors = way.load(output, sample, way.prepare(output))
    except UnavailableError as error:
        pytest.skip(f"{way.name}: {error}")
    with PreparedCheckpoint(output) as checkpoint:
        assert contents(tensors) == contents([checkpoint.read(name) for name in checkpoint.names])


def test_the_script_reports_times_goals_and_bytes(output: Path, sample: Path) -> None:
    arguments = [str(output), str(sample), "--rounds", "1", "--only", "ours", "--only", "instanttensor"]
    result = CliRunner().invoke(bench_load.main, arguments)
    assert result.exit_code == 0, result.output
    assert "instanttensor        skipped: " in result.output
    assert "'ours' no slower than 'load_file'" in result.output
    assert "a rank of 8 reads 0." in result.output


def test_an_unknown_way_is_refused(output: Path, sample: Path) -> None:
    result = CliRunner().invoke(bench_load.main, [str(output), str(sample), "--only", "nothing"])
    assert result.exit_code == 2
    assert "unknown: nothing" in result.output


def test_the_bytes_of_the_ranks_are_counted(output: Path) -> None:
    counted = bench_load.bytes_of_ranks(output)
    with PreparedCheckpoint(output) as checkpoint:
        assert counted.shared + counted.replicated == sum(one.nbytes for one in checkpoint.tensors.values())
    assert counted.read >= counted.replicated + counted.shared / 8
