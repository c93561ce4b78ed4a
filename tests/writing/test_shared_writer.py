"""Writing into a run from other processes: late writers of ended runs do no harm."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deepinfer_prep.errors import ConversionError
from deepinfer_prep.files.storage import FileState
from deepinfer_prep.naming import WORKSPACE_NAME
from deepinfer_prep.planning.plan import OutputFile
from deepinfer_prep.writing.local_target import LocalRun
from deepinfer_prep.writing.shared_writer import SharedWriter
from deepinfer_prep.writing.target import Block, Chunks
from deepinfer_prep.writing.workspace import Workspace

SIZE = 8192
BLOCK = Block("sub/model.safetensors", SIZE, 0, 0, SIZE)


def chunks(fill: int) -> Chunks:
    yield 0, np.full(SIZE // 2, fill, np.uint8)
    yield SIZE // 2, np.full(SIZE // 2, fill, np.uint8)


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    with Workspace(tmp_path / "out") as held:
        yield held


def begin(workspace: Workspace, identity: str) -> tuple[LocalRun, SharedWriter]:
    """A run of one file, and its writer as another process gets it."""
    file = OutputFile(BLOCK.name, Path("source"), FileState(SIZE, 0), b"", 0, SIZE, (), ())
    run = LocalRun(workspace, {"run": identity}, [file])
    run.read_done()
    return run, pickle.loads(pickle.dumps(run.share()))


def test_what_is_put_elsewhere_is_in_the_workspace(workspace: Workspace) -> None:
    run, writer = begin(workspace, "one")
    writer.check()
    writer.put(BLOCK, chunks(7))
    assert workspace.path(BLOCK.name).read_bytes() == bytes([7]) * SIZE
    run.close()


def test_a_writer_of_an_earlier_run_writes_nothing_into_a_later_one(workspace: Workspace) -> None:
    earlier, late = begin(workspace, "one")
    earlier.close()
    workspace.clear()
    run, _ = begin(workspace, "two")
    for attempt in (late.check, lambda: late.put(BLOCK, chunks(7))):
        with pytest.raises(ConversionError, match="its run has ended") as raised:
            attempt()
        assert raised.value.code == "other-place"
    assert workspace.path(BLOCK.name).read_bytes() == bytes(SIZE)
    run.close()


def test_a_write_that_began_in_an_earlier_run_goes_to_a_file_that_is_gone(workspace: Workspace) -> None:
    earlier, late = begin(workspace, "one")
    earlier.close()
    runs = []

    def interrupted() -> Chunks:
        workspace.clear()
        runs.append(begin(workspace, "two")[0])
        yield from chunks(7)

    late.put(BLOCK, interrupted())
    assert workspace.path(BLOCK.name).read_bytes() == bytes(SIZE)
    runs[0].close()


def test_a_writer_that_comes_after_publication_makes_no_file(workspace: Workspace) -> None:
    run, late = begin(workspace, "one")
    workspace.files.remove_tree("sub")  # As after a rename to the final name.
    with pytest.raises(ConversionError, match="its run has ended"):
        late.put(BLOCK, chunks(7))
    assert not workspace.holds(BLOCK.name)
    run.close()
    workspace.discard()
    with pytest.raises(ConversionError, match="its run has ended"):
        late.put(BLOCK, chunks(7))
    assert not (workspace.output.path / WORKSPACE_NAME).exists()


def test_a_folder_that_is_another_one_on_a_node_is_not_taken_for_the_output(
    workspace: Workspace, tmp_path: Path
) -> None:
    run, writer = begin(workspace, "one")
    workspace.output.path.rename(tmp_path / "elsewhere")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConversionError, match="every node has to see the same output folder"):
        writer.check()
    (tmp_path / "out").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "out")
    run.close()
