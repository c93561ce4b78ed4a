"""Faults that people met with scales: each gets the behaviour that helps. Numbers are those of the list of cases."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from deepinfer_prep import (
    Options,
    convert_checkpoint,
    inspect_checkpoint,
    verify_checkpoint,
)
from deepinfer_prep.cli.main import main
from deepinfer_prep.manifest import read_manifest
from tests.families.raw import NUMPY_TYPES, Stored, read_file
from tests.families.running import converted, one_file, refusal
from tests.small_files import ONE_F32, SCALE, WEIGHT, Tensor, write_config, write_file, write_index

SIDECAR = "neuron/neuron-00001-of-00001.safetensors"


def scale_tensor(dtype: str, values: list[float], shape: tuple[int, ...]) -> Tensor:
    return dtype, shape, np.asarray(values).astype(NUMPY_TYPES[dtype]).tobytes()


SCALES: dict[str, Tensor] = {
    "F64": scale_tensor("F64", [1, 2, 3, 4], (2, 2)),
    "F32": scale_tensor("F32", [1, 2, 3, 4], (2, 2)),
    "BF16": scale_tensor("BF16", [1, 2, 3, 4], (2, 2)),
    "F16": scale_tensor("F16", [1, 2, 3, 4], (2, 2)),
    "F8_E8M0": scale_tensor("F8_E8M0", [1, 2, 4, 8], (2, 2)),
    "U8": scale_tensor("U8", [126, 127, 128, 129], (2, 2)),
}


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("dtype", SCALES)
def test_a_scale_in_another_shard(source: Path, output: Path, dtype: str, order: str, has_index: bool) -> None:
    """1: every tensor stays in its shard; the kernel scale goes to the sidecar or is the stored one."""
    weight_file, scale_file = (f"{letter}.safetensors" for letter in order)
    write_file(source / weight_file, {"l.weight": WEIGHT})
    write_file(source / scale_file, {"l.weight_scale_inv": SCALES[dtype]})
    if has_index:
        write_index(source, {"l.weight": weight_file, "l.weight_scale_inv": scale_file})
    write_config(source, quant_method="fp8", weight_block_size=[32, 32], scale_fmt="ue8m0")
    result = convert_checkpoint(source, output, workers=1)
    (weight,) = read_file(output / weight_file).values()
    (scale,) = read_file(output / scale_file).values()
    assert set(weight.data) == {0x76}
    assert scale.dtype == dtype
    before = Stored(*SCALES[dtype])
    if dtype == "U8":
        assert scale.codes.tolist() == [[127, 128], [129, 130]]
    else:
        np.testing.assert_array_equal(scale.values, 2 * before.values)
    kinds = {"F8_E8M0": "stored", "U8": "stored"}
    assert dict(result.kernel_scales) == {kinds.get(dtype, "not every scale is a positive power of two"): 1}
    assert verify_checkpoint(output, source=source).ok


def test_the_scale_of_the_first_case_as_reported(source: Path, output: Path) -> None:
    write_file(source / "a.safetensors", {"l.weight": WEIGHT})
    write_file(source / "b.safetensors", {"l.scale": SCALE})
    write_index(source, {"l.weight": "a.safetensors", "l.scale": "b.safetensors"})
    tensors = converted(source, output)
    assert (set(tensors["l.weight"].data), set(tensors["l.scale"].data)) == ({0x76}, {128})


def test_fp8_weights_without_any_scale_are_all_named(source: Path, output: Path) -> None:
    """2: also by the command, which writes nothing."""
    one_file(source, {"mtp.0.e_proj.weight": WEIGHT, "mtp.0.h_proj.weight": WEIGHT})
    message = refusal(source, output)
    assert "F8_E4M3 tensors that have no scale (2): 'mtp.0.e_proj.weight'" in message
    assert "'mtp.0.h_proj.weight' in model.safetensors" in message
    assert "2 cannot be copied as they are" in message
    assert "element 0 is the fp8 code 0x7e (448)" in message
    result = CliRunner().invoke(main, ["convert", str(source), str(output), "--quiet"])
    assert result.exit_code == 1
    assert not output.exists()


@pytest.mark.parametrize(
    ("name", "shape"),
    [("w", (64,)), ("a.experts.up_proj", (2, 64, 64)), ("a.weight", (1, 1)), ("", (3,)), ("a.bias", ())],
)
def test_unscaled_fp8_of_any_name_and_shape_is_refused(
    source: Path, output: Path, name: str, shape: tuple[int, ...]
) -> None:
    one_file(source, {name: ("F8_E4M3", shape, 0x7E), "l.weight": WEIGHT, "l.scale": SCALE})
    assert f"F8_E4M3 tensors that have no scale (1): {name!r}" in refusal(source, output)


def test_harmless_unscaled_fp8_is_refused_with_the_fact_and_copied_when_asked(source: Path, output: Path) -> None:
    """3"""
    one_file(source, {"x.weight": ("F8_E4M3", (64, 64), 0x38)})
    assert "none holds a code above 240: --unscaled copy-if-safe copies them exactly" in refusal(source, output)
    assert set(converted(source, output, unscaled="copy-if-safe")["x.weight"].data) == {0x38}
    assert read_manifest(output).unscaled == ("x.weight",)


@pytest.mark.parametrize(
    "near",
    [
        "l.weight_qscale",
        "l.scales",
        "l.weight.amax",
        "l.weight_sf",
        "m.weight_scale",
        "layers.0.q.weight_scaling_factor",
    ],
)
def test_near_miss_names_stand_in_the_refusal(source: Path, output: Path, near: str) -> None:
    """4: in the same module, in the module above, or under another prefix."""
    weight = {"m": "m.l.weight", "layers": "model.layers.0.q.weight"}.get(near.partition(".")[0], "l.weight")
    one_file(source, {weight: WEIGHT, near: ("F32", (), ONE_F32)})
    assert f"Names beside the first that look like a scale: {near}." in refusal(source, output)


def test_scales_of_other_things_in_the_modules_above_are_no_near_misses(source: Path, output: Path) -> None:
    tensors: dict[str, Tensor] = {
        "mtp.0.e_proj.weight": WEIGHT,
        "mtp.0.hc_attn_scale": ("F32", (3,), ONE_F32 * 3),
        "mtp.0.norm.scale": ("F32", (3,), ONE_F32 * 3),
    }
    one_file(source, tensors)
    assert "look like a scale" not in refusal(source, output)


EVIDENCE: dict[str, dict[str, Any]] = {
    "scale_fmt": {"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
    "scale_fmt alone": {"scale_fmt": "ue8m0"},
    "method": {"quant_method": "mxfp8"},
    "block": {"quant_method": "fp8", "weight_block_size": [1, 32]},
}


@pytest.mark.parametrize("last", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("evidence", EVIDENCE)
def test_e8m0_in_u8_counts_where_the_config_says_so(source: Path, output: Path, evidence: str, last: str) -> None:
    """6"""
    one_file(source, {"l.weight": WEIGHT, f"l.{last}": ("U8", (64, 2), 127)})
    write_config(source, **EVIDENCE[evidence])
    assert set(converted(source, output)[f"l.{last}"].data) == {128}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "compressed-tensors", "config_groups": {}},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "quark", "global_quant_config": {"weight": {"qscheme": "per_group", "group_size": 32}}},
        {"quant_method": "fbgemm_fp8"},
    ],
)
def test_u8_beside_fp8_without_evidence_is_refused(source: Path, output: Path, config: dict[str, Any]) -> None:
    one_file(source, {"l.weight": WEIGHT, "l.weight_scale": ("U8", (64, 2), 127)})
    write_config(source, **config)
    message = refusal(source, output)
    assert "have a scale `weight_scale` of dtype U8, and the config does not say what its bytes mean" in message
    assert '"scale_fmt": "ue8m0"' in message


UNDOUBLABLE = [
    ("F8_E8M0", 254, "e8m0 byte 254"),
    ("F8_E8M0", 255, "e8m0 byte 255 (NaN)"),
    ("U8", 254, "e8m0 byte 254"),
    ("F16", 32768.0, "32768.0, which has no finite F16 double"),
    ("F16", math.nan, "nan"),
    ("BF16", math.inf, "inf"),
    ("F32", 2.0**127 * 1.5, "no finite F32 double"),
    ("F64", -math.inf, "-inf"),
]


@pytest.mark.parametrize("position", [0, 1, 3])
@pytest.mark.parametrize(("dtype", "value", "message"), UNDOUBLABLE)
def test_a_scale_without_a_double_is_refused_by_name(
    source: Path, output: Path, dtype: str, value: float, message: str, position: int
) -> None:
    """8: whatever the dtype, wherever it stands, in whichever file."""
    is_byte = dtype in ("F8_E8M0", "U8")
    scales = np.full(4, 127 if is_byte else 1.0)
    scales[position] = value
    data = scales.astype(np.uint8 if is_byte else NUMPY_TYPES[dtype]).tobytes()
    write_file(source / "a.safetensors", {"k.weight": WEIGHT, "l.weight": WEIGHT, "k.weight_scale_inv": SCALE})
    write_file(source / "b.safetensors", {"l.weight_scale_inv": (dtype, (2, 2), data)})
    write_config(source, quant_method="fp8", weight_block_size=[32, 32], scale_fmt="ue8m0")
    found = refusal(source, output)
    assert f"b.safetensors: tensor 'l.weight_scale_inv': element {position} is " in found
    assert message in found
    scanned = inspect_checkpoint(source, scan=True)
    assert any(f"element {position} is " in sentence for sentence in scanned.refusals)


def test_verify_flags_a_nan_scale_in_an_output(source: Path, output: Path) -> None:
    one_file(source, {"l.weight": WEIGHT, "l.scale": SCALE})
    convert_checkpoint(source, output)
    path = output / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    found = verify_checkpoint(output)
    assert any("not finite" in str(difference) and "'l.scale'" in str(difference) for difference in found.first)


def test_an_edge_block_converts_and_the_kernels_limits_are_told(source: Path, output: Path) -> None:
    """10: the kernel scale is [3, 4]; no kernel takes 80 x 100."""
    one_file(source, {"l.weight": ("F8_E4M3", (80, 100), 0x7E), "l.scale": ("F8_E8M0", (3, 4), 127)})
    result = convert_checkpoint(source, output)
    record = read_manifest(output).weights["l.weight"]
    assert (record.block, record.kernel_scale) == ((32, 32), "l.scale")
    assert read_file(output / "model.safetensors")["l.scale"].shape == (3, 4)
    assert any(
        "outside the kernels' limits" in warning and "l.weight [80, 100]" in warning for warning in result.warnings
    )


@pytest.mark.parametrize(
    ("shape", "grid"),
    [((576, 128), (5, 1)), ((129, 257), (2, 3)), ((1, 1), (1, 1)), ((127, 384), (1, 3)), ((2, 130, 40), (2, 2, 1))],
)
def test_blocks_are_the_configs_and_never_divided_from_shapes(
    source: Path, output: Path, shape: tuple[int, ...], grid: tuple[int, ...]
) -> None:
    """11: 576 rows in 5 blocks are blocks of 128, the last one cropped, and not of 116."""
    exponents = np.arange(math.prod(grid)) % 7 - 3
    scales = np.exp2(exponents.astype(np.float32)).reshape(grid)
    stacked = "l.experts.w" if len(shape) == 3 else "l.weight"
    name = stacked + "_scale_inv"
    one_file(source, {stacked: ("F8_E4M3", shape, 0x7E), name: ("F32", grid, scales.tobytes())})
    write_config(source, weight_block_size=[128, 128])
    converted(source, output)
    kernel = read_file(output / SIDECAR)[f"{stacked}.nki_scale"]
    rows, columns = (-(-size // 32) for size in shape[-2:])
    assert kernel.shape == (*shape[:-2], rows, columns)
    covering = scales[..., np.arange(rows) * 32 // 128, :][..., np.arange(columns) * 32 // 128]
    np.testing.assert_array_equal(np.exp2(kernel.codes - 127.0), 2 * covering)


STATIC: dict[str, Tensor] = {
    "q.weight": WEIGHT,
    "q.weight_scale": ("F32", (), ONE_F32),
    "q.input_scale": ("F32", (), ONE_F32),
    "k_proj.k_scale": ("F32", (), ONE_F32),
}


def test_static_activation_scales_are_kept_when_asked_and_reported(source: Path, output: Path) -> None:
    """14: with a warning that names the count and the option; by default they are doubled."""
    one_file(source, STATIC)
    result = convert_checkpoint(source, output, options=Options(activation_scales="keep"))
    (warning,) = [warning for warning in result.warnings if "static" in warning]
    assert warning.startswith("2 static activation or KV-cache scales are kept, q.input_scale among them.")
    assert "--activation-scales keep" in warning
    tensors = read_file(output / "model.safetensors")
    assert tensors["q.weight_scale"].values == 2
    assert tensors["q.input_scale"].data == tensors["k_proj.k_scale"].data == ONE_F32


def test_no_other_one_byte_tensor_is_taken_for_fp8(source: Path, output: Path) -> None:
    """16: fp4 experts, int8, packed bytes, booleans, exponents and e5m2 stay as they are."""
    tensors: dict[str, Tensor] = {
        "e.w1.weight": ("I8", (64, 32), 0x7E),
        "e.w1.scale": ("F8_E8M0", (64, 2), 127),
        "i.weight": ("I8", (64, 64), 0x7E),
        "i.weight_scale": ("F32", (), ONE_F32),
        "u.weight": ("U8", (64, 64), 0x7E),
        "u.weight_scale": ("U8", (64, 2), 127),
        "b.weight": ("BOOL", (8,), 1),
        "b.weight_scale": ("F32", (), ONE_F32),
        "m.weight": ("F8_E8M0", (8,), 200),
        "m.scale": ("F8_E8M0", (8,), 127),
        "f.weight": ("F8_E5M2", (8, 8), 0x7A),
        "f.weight_scale": ("F32", (), ONE_F32),
        "l.weight": WEIGHT,
        "l.scale": SCALE,
    }
    one_file(source, tensors)
    write_config(source, scale_fmt="ue8m0")
    before, after = read_file(source / "model.safetensors"), converted(source, output)
    assert [name for name in before if before[name] != after[name]] == ["l.weight", "l.scale"]
