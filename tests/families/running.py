"""Runs small hand-written checkpoints through the converter, for tests of single cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deepinfer_prep import Options, PrepError, convert_checkpoint, verify_checkpoint
from tests.families.raw import Stored, read_file
from tests.small_files import Tensor, write_file


def one_file(folder: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    write_file(folder / "model.safetensors", tensors, metadata)


def converted(folder: Path, output: Path, **options: Any) -> dict[str, Stored]:
    """The tensors of the output, which verifies against its source."""
    convert_checkpoint(folder, output, options=Options(**options), workers=1)
    assert verify_checkpoint(output, source=folder, workers=1).first == ()
    files = [path for path in output.glob("*.safetensors") if not path.name.startswith("neuron-")]
    return {name: stored for path in files for name, stored in read_file(path).items()}


def refusal(folder: Path, output: Path, **options: Any) -> str:
    """The sentences of the refusal; nothing was written."""
    with pytest.raises(PrepError) as caught:
        convert_checkpoint(folder, output, options=Options(**options), workers=1)
    assert not output.exists()
    return str(caught.value)
