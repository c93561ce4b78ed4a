"""Checkpoints that other people's tools made, where they lie beside the project."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer_prep import RefusedError, convert_checkpoint, inspect_checkpoint, verify_checkpoint
from tests.independent_reader import assert_equal_but_for_rounded_codes, dequantize_all, load_checkpoint
from tests.small_files import tree

REAL = Path(__file__).parents[3] / "shared" / "data" / "real"

pytestmark = pytest.mark.skipif(not REAL.is_dir(), reason=f"{REAL} is not there: it is no part of the project")

REASONS = {
    "minilm-fp8-block": "not every scale is a positive power of two",
    "minilm-fp8-dynamic": "not every scale is a positive power of two",
    "minilm-mxfp8": "rows that share a block of 32 have different scales",
}


@pytest.mark.parametrize("name", sorted(REASONS))
def test_real_checkpoints_keep_their_numbers(tmp_path: Path, name: str) -> None:
    source, output = REAL / name, tmp_path / "out"
    result = convert_checkpoint(source, output)
    assert result.family == "compressed-tensors"
    assert result.kernel_scales == {REASONS[name]: 12}
    assert verify_checkpoint(output, source=source).ok
    before, after = load_checkpoint(source), load_checkpoint(output)
    moved = assert_equal_but_for_rounded_codes(
        dequantize_all(before, "weight_scale"), dequantize_all(after, "weight_scale"), before
    )
    assert 0 < moved <= result.counts.rounded
    highest = max(
        int((weight.view(torch.uint8) & 0x7F).max()) for weight in after.values() if weight.dtype == torch.float8_e4m3fn
    )
    assert highest == 0x76, "every row or tensor of these checkpoints reaches 448, whose half is 224"
    unchanged = tree(source).keys() - {"model.safetensors"}
    assert all(tree(source)[file] == tree(output)[file] for file in unchanged)


def test_fp8_tensors_that_are_scales_are_refused(tmp_path: Path) -> None:
    source = REAL / "minilm-nvfp4a16"
    assert inspect_checkpoint(source).refusals
    with pytest.raises(RefusedError, match=r"block scales of packed 4-bit weights \(NVFP4\), not weights \(12\)"):
        convert_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
