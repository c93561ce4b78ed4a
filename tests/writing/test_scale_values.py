"""What the values of scales and zero points say before anything is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from deepinfer_prep import Options, RefusedError, convert_checkpoint, inspect_checkpoint
from deepinfer_prep.cli.main import main
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


def trained(largest: bool, dtype: str = "F32", deviation: float = 0.02) -> dict[str, Tensor]:
    """A weight as training leaves it, in blocks of 128x128; `largest`: the scales are the blocks' largest values."""
    values = np.random.default_rng(3).normal(0, deviation, (256, 384))
    blocks = values.reshape(2, 128, 3, 128)
    largest_values = np.abs(blocks).max(axis=(1, 3))
    codes = (blocks / largest_values[:, None, :, None] * 448).astype(NUMPY_TYPES["F8_E4M3"])
    scale = (largest_values if largest else largest_values / 448).astype(NUMPY_TYPES[dtype])
    return {
        "l__weight": ("F8_E4M3", (256, 384), codes.tobytes()),
        "l__weight_scale_inv": (dtype, (2, 3), scale.tobytes()),
    }


@pytest.mark.parametrize("deviation", [0.05, 0.2])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_the_largest_values_of_blocks_are_not_taken_for_factors(tmp_path: Path, dtype: str, deviation: float) -> None:
    source = source_of(tmp_path, **trained(largest=True, dtype=dtype, deviation=deviation))
    message = refused(source, tmp_path / "o")
    assert "tensor 'l.weight': with its scale" in message
    assert "--implausible-scales accept" in message
    assert any("tensor 'l.weight'" in text for text in inspect_checkpoint(source, scan=True).refusals)
    result = convert_checkpoint(source, tmp_path / "o", options=Options(implausible_scales="accept"))
    assert any("unusually large, l.weight_scale_inv" in text for text in result.warnings)


def test_factors_of_the_same_weight_are_not_mentioned(tmp_path: Path) -> None:
    result = convert_checkpoint(source_of(tmp_path, **trained(largest=False)), tmp_path / "o")
    assert not any("unusually" in text for text in result.warnings)


def test_a_scale_of_one_beside_small_codes_is_not_mentioned(tmp_path: Path) -> None:
    """Weights that were cast without a scale."""
    values = np.random.default_rng(3).normal(0, 0.5, (64, 64)).astype(NUMPY_TYPES["F8_E4M3"])
    source = source_of(
        tmp_path, l__weight=("F8_E4M3", (64, 64), values.tobytes()), l__weight_scale=("F32", (), ONE_F32)
    )
    assert not any("unusually" in text for text in convert_checkpoint(source, tmp_path / "o").warnings)


def test_what_scales_say_is_told_before_anything_is_written(tmp_path: Path) -> None:
    source = source_of(tmp_path, l__weight=WEIGHT, l__weight_scale=stored("F32", *([0.5] * 64)))
    told: list[tuple[str, bool]] = []

    def warn(text: str) -> None:
        told.append((text, (tmp_path / "o").exists()))

    result = convert_checkpoint(source, tmp_path / "o", warn=warn)
    ((text, written),) = told
    assert "1 scales are unusually large" in text
    assert text in result.warnings
    assert not written
    command = CliRunner().invoke(main, ["convert", str(source), str(tmp_path / "second")])
    assert "warning: 1 scales are unusually large" in command.stderr
    quiet = CliRunner().invoke(main, ["convert", str(source), str(tmp_path / "third"), "--quiet"])
    assert not quiet.stderr
    assert "warning: 1 scales are unusually large" in quiet.stdout


def test_a_sample_reads_little_of_a_large_weight(tmp_path: Path) -> None:
    """The pieces are taken from begin, middle and end."""
    rows = 16 * 1024
    codes = np.zeros((rows, 64), np.uint8)
    codes[-1024:] = np.random.default_rng(1).integers(0x60, 0x7F, (1024, 64))
    source = source_of(
        tmp_path,
        l__weight=("F8_E4M3", (rows, 64), codes.tobytes()),
        l__weight_scale=("F32", (), np.float32(0.2).tobytes()),
    )
    assert "--implausible-scales accept" in refused(source, tmp_path / "o")
