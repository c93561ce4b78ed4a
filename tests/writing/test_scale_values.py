"""What the values of scales and zero points say before anything is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deepinfer_prep import Options, RefusedError, convert_checkpoint, inspect_checkpoint
from tests.families.raw import NUMPY_TYPES
from tests.small_files import ONE_F32, SCALE, WEIGHT, Tensor, write_file


def stored(dtype: str, *values: float) -> Tensor:
    content = np.asarray(values).astype(NUMPY_TYPES[dtype])
    return dtype, (len(values),), content.tobytes()


def source_of(folder: Path, **tensors: Tensor) -> Path:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    write_file(folder / "source" / "model.safetensors", named)
    return folder / "source"


def refused(source: Path, output: Path) -> str:
    with pytest.raises(RefusedError) as caught:
        convert_checkpoint(source, output)
    assert not output.exists()
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F64"])
@pytest.mark.parametrize("value", [32.0, 4480.0, -0.001])
def test_a_scale_that_cannot_be_meant_to_multiply_is_refused_by_element(
    tmp_path: Path, dtype: str, value: float
) -> None:
    scale = stored(dtype, *([0.001] * 63), value)
    source = source_of(
        tmp_path, a__weight=WEIGHT, a__weight_scale=("F32", (), ONE_F32), l__weight=WEIGHT, l__weight_scale=scale
    )
    message = refused(source, tmp_path / "o")
    assert "tensor 'l.weight_scale': element 63 is" in message
    assert "--implausible-scales accept" in message
    assert any("element 63" in text for text in inspect_checkpoint(source, scan=True).refusals)
    result = convert_checkpoint(source, tmp_path / "o", options=Options(implausible_scales="accept"))
    assert value < 0 or any("unusually large, l.weight_scale" in text for text in result.warnings)


def test_an_exponent_that_cannot_be_meant_to_multiply_is_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path, l__weight=WEIGHT, l__scale=("F8_E8M0", (2, 2), bytes([127, 127, 132, 127])))
    assert "tensor 'l.scale': element 2 is the scale 32" in refused(source, tmp_path / "o")


def test_a_scale_just_below_passes(tmp_path: Path) -> None:
    source = source_of(tmp_path, l__weight=WEIGHT, l__scale=("F8_E8M0", (2, 2), 131))
    result = convert_checkpoint(source, tmp_path / "o")
    assert any("1 scales are unusually large, l.scale with 16 among them" in text for text in result.warnings)


def test_usual_scales_are_not_mentioned(tmp_path: Path) -> None:
    source = source_of(tmp_path, l__weight=WEIGHT, l__weight_scale=stored("F32", *([0.01] * 64)))
    assert not any("unusually" in text for text in convert_checkpoint(source, tmp_path / "o").warnings)


def test_a_scale_that_looks_like_a_blocks_largest_value_is_told_before_by_a_scan(tmp_path: Path) -> None:
    source = source_of(tmp_path, l__weight=WEIGHT, l__weight_scale=stored("F32", *([0.5] * 64)))
    found = inspect_checkpoint(source, scan=True)
    assert any("If it is the block's largest value" in text for text in found.warnings)
    assert found.refusals == ()


def test_scales_of_activations_may_have_any_size(tmp_path: Path) -> None:
    """They are doubled by the same run of bytes as the scale before them."""
    large = stored("F32", 5000.0)
    source = source_of(tmp_path, l__weight=WEIGHT, l__weight_scale=stored("F32", 0.01), l__input_scale=large)
    convert_checkpoint(source, tmp_path / "o")
    source = source_of(tmp_path / "second", l__input_scale=large, l__weight=WEIGHT, l__weight_scale=large)
    assert "tensor 'l.weight_scale': element 0" in refused(source, tmp_path / "p")


ZERO_POINTS = ["weight_zp", "weight_zero_point", "weight_offset", "zero_point", "weight_zeros", "qzeros", "weight.zp"]


@pytest.mark.parametrize("dtype", ["F32", "BF16", "I8", "U8", "I32", "F64"])
@pytest.mark.parametrize("name", ZERO_POINTS)
def test_zero_points_have_to_be_zero(tmp_path: Path, name: str, dtype: str) -> None:
    known: dict[str, Tensor] = {"l__weight": WEIGHT, "l__weight_scale": stored("F32", *([0.01] * 64))}
    source = source_of(tmp_path, **known, **{f"l__{name}": stored(dtype, *([0] * 63), 3)})
    assert f"tensor 'l.{name}' is a zero point or offset and not zero" in refused(source, tmp_path / "o")
    assert any(f"l.{name}" in text for text in inspect_checkpoint(source).warnings)
    source = source_of(tmp_path / "zero", **known, **{f"l__{name}": stored(dtype, *([0] * 64))})
    convert_checkpoint(source, tmp_path / "o")


def test_a_negative_zero_is_zero_and_an_exponent_is_no_zero_point(tmp_path: Path) -> None:
    known = {"l__weight": WEIGHT, "l__scale": SCALE}
    convert_checkpoint(source_of(tmp_path, **known, l__weight_zp=stored("F32", -0.0)), tmp_path / "o")
    source = source_of(tmp_path / "second", **known, l__weight_zp=("F8_E8M0", (1,), 127))
    assert "a zero point of dtype F8_E8M0 cannot be read as numbers" in refused(source, tmp_path / "p")
