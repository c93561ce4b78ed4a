"""Configs are found wherever they lie, in whichever dialect, and none hides another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deepinfer_prep.errors import CheckpointError
from deepinfer_prep.families.quantization_config import Quantization
from deepinfer_prep.families.schemes import as_block, states_exponents, states_fp8
from deepinfer_prep.files.checkpoint import open_checkpoint
from deepinfer_prep.kernel_scale import Derived
from deepinfer_prep.options import Options
from deepinfer_prep.planning.plan import Plan, plan_conversion
from tests.small_files import ONE_F32, WEIGHT, Tensor, write_file

FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
GRID: Tensor = ("F32", (2, 2), ONE_F32 * 4)
LARGE: Tensor = ("F8_E4M3", (256, 384), 0x7E)
LARGE_GRID: Tensor = ("F32", (2, 3), ONE_F32 * 6)


def plan_of(folder: Path, tensors: dict[str, Tensor], **files: Any) -> Plan:
    write_file(folder / "model.safetensors", tensors)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return plan_conversion(open_checkpoint(folder), Options())


def block_of(folder: Path, tensors: dict[str, Tensor], **files: Any) -> tuple[int, int] | None:
    plan = plan_of(folder, tensors, **files)
    assert plan.refusals == ()
    return plan.weights[0].quantized.block


WRAPPERS = [
    [],
    ["text_config"],
    ["language_config"],
    ["llm_config"],
    ["thinker_config", "text_config"],
    ["whatever_comes_next"],
    ["model", "decoder", "backbone", "inner"],
]


@pytest.mark.parametrize("key", ["quantization_config", "compression_config", "quantization", "quant_config"])
@pytest.mark.parametrize("wrappers", WRAPPERS)
def test_a_config_is_found_under_any_wrapper(tmp_path: Path, wrappers: list[str], key: str) -> None:
    config: Any = {key: FP8}
    for wrapper in reversed(wrappers):
        config = {wrapper: config, "hidden_size": 64}
    assert block_of(tmp_path, {"l.weight": WEIGHT, "l.weight_scale_inv": GRID}, config=config) == (32, 32)


def test_a_config_in_a_list_of_parts_is_found(tmp_path: Path) -> None:
    config = {"sub_models": [{"name": "vision"}, {"name": "text", "quantization_config": FP8}]}
    assert block_of(tmp_path, {"l.weight": WEIGHT, "l.weight_scale_inv": GRID}, config=config) == (32, 32)


@pytest.mark.parametrize("name", ["quantization_config", "quantize_config", "hf_quant_config", "my_quant"])
def test_a_config_in_a_file_of_its_own_is_found(tmp_path: Path, name: str) -> None:
    assert block_of(tmp_path, {"l.weight": WEIGHT, "l.weight_scale": GRID}, **{name: FP8}) == (32, 32)


SAYING_NOTHING: list[dict[str, Any]] = [
    {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
    {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}}},
    {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"other": {"quant_algo": "FP8"}}}},
    {"quantization": {"quant_algo": "SOMETHING_NEW"}},
    {"quantization": {"quant_algo": "FP8_BLOCK_SCALES"}},
    {"producer": {"name": "modelopt"}},
    {},
]


@pytest.mark.parametrize("side", SAYING_NOTHING)
@pytest.mark.parametrize("name", ["hf_quant_config", "quant_notes"])
def test_a_side_file_does_not_hide_a_config_that_knows_the_block(
    tmp_path: Path, name: str, side: dict[str, Any]
) -> None:
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    tensors = {"l.weight": LARGE, "l.weight_scale_inv": LARGE_GRID}
    assert block_of(tmp_path, tensors, config=config, **{name: side}) == (128, 128)


def test_each_part_of_a_model_is_read_by_its_own_config(tmp_path: Path) -> None:
    """Both blocks would give the same grid here: only the wrapper's name tells which is meant."""
    config = {
        "talker_config": {"quantization_config": {"weight_block_size": [32, 32]}},
        "thinker_config": {"quantization_config": {"weight_block_size": [33, 33]}},
    }
    tensors = {f"{part}.l.{last}": tensor for part in ("thinker", "talker") for last, tensor in (("weight", WEIGHT),)}
    tensors |= {"thinker.l.weight_scale": GRID, "talker.l.weight_scale": GRID}
    blocks = {
        found.quantized.weight: found.quantized.block for found in plan_of(tmp_path, tensors, config=config).weights
    }
    assert blocks["thinker.l.weight"] == (33, 33)


@pytest.mark.parametrize("quantization", [1, "fp8", [FP8], None, {}])
def test_a_config_of_another_kind_is_no_crash(tmp_path: Path, quantization: Any) -> None:
    write_file(tmp_path / "model.safetensors", {"l.weight": WEIGHT})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    assert Quantization(open_checkpoint(tmp_path)).schemes("l.weight") in (
        [],
        Quantization(open_checkpoint(tmp_path)).schemes("x"),
    )


def test_a_damaged_side_file_is_named(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"l.weight": WEIGHT})
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json is not valid JSON"):
        open_checkpoint(tmp_path)


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm, **more}}


def quark(**scheme: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "quark", "global_quant_config": {"weight": scheme}}}


def auto_round(**more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "auto-round", "bits": 8, "data_type": "fp8", **more}}


def layer(name: str) -> dict[str, Any]:
    return modelopt("MIXED_PRECISION", quantized_layers={name: {"quant_algo": "FP8_PB_WO"}})


GROUP = {"type": "float", "num_bits": 8}


def compressed(**weights: Any) -> dict[str, Any]:
    groups = {"g": {"targets": ["Linear"], "weights": {**GROUP, **weights}}}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}


STATED: dict[str, dict[str, Any]] = {
    **{
        f"ModelOpt {name}": modelopt(name) for name in ("FP8_PB_WO", "FP8_BLOCK_SCALES", "FP8_2D_BLOCKWISE_WEIGHT_ONLY")
    },
    "ModelOpt in small letters": modelopt("fp8_pb_wo"),
    "ModelOpt, real quantization": modelopt("FP8_PB_REAL"),
    "ModelOpt, its own size": modelopt("FP8_BLOCK_SCALES", weight_block_size=[128, 128]),
    "ModelOpt, by layer": layer("l"),
    "ModelOpt, by pattern": layer("*"),
    "Quark per_block": quark(dtype="fp8_e4m3", qscheme="per_block", block_size=[128, 128]),
    "Quark per_group of two sizes": quark(dtype="fp8_e4m3", qscheme="per_group", group_size=[128, 128]),
    "auto-round, a list": auto_round(group_size=[128, 128]),
    "auto-round, an exception by name": auto_round(group_size=-1, extra_config={"l": {"group_size": [128, 128]}}),
    "auto-round, an exception by pattern": auto_round(extra_config={"*": {"weight_block_size": [128, 128]}}),
    "compressed-tensors block": compressed(strategy="block", block_structure=[128, 128]),
    "compressed-tensors, as text": compressed(strategy="block", block_structure="128x128"),
    "compressed-tensors, a group of two sizes": compressed(strategy="group", group_size=[128, 128]),
    "a leading axis": {"quantization_config": {"weight_block_size": [1, 128, 128]}},
    "w4afp8": {"quantization_config": {"quant_method": "w4afp8", "group_size": 128, "weight_block_size": [128, 128]}},
}
GRIDS: list[tuple[int, ...]] = [(2, 3), (2, 1, 3, 1), (1, 2, 3), (2, 3, 1), (1, 2, 1, 3)]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("stated", STATED)
def test_blocks_are_understood_in_every_dialect_and_grid(tmp_path: Path, stated: str, grid: tuple[int, ...]) -> None:
    """Axes of 1 in the grid mean nothing; the kernel's scale has the kernel's shape."""
    tensors: dict[str, Tensor] = {"l.weight": LARGE, "l.weight_scale": ("F32", grid, ONE_F32 * 6)}
    plan = plan_of(tmp_path, tensors, config=STATED[stated])
    (weight,) = plan.weights
    assert (plan.refusals, weight.quantized.block) == ((), (128, 128))
    assert isinstance(weight.kernel_scale, Derived)
    assert weight.kernel_scale.shape == (8, 12)


def test_a_grid_of_another_order_is_not_squeezed_into_place(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {"l.weight": LARGE, "l.weight_scale": ("F32", (3, 1, 2, 1), ONE_F32 * 6)}
    assert block_of(tmp_path, tensors, config=modelopt("FP8_PB_WO")) is None


EXPONENTS: dict[str, dict[str, Any]] = {
    "auto-round mx_fp": {"quant_method": "auto-round", "data_type": "mx_fp", "group_size": 32},
    "auto-round mx_fp8": {"quant_method": "auto-round", "data_type": "mx_fp8"},
    "mxfp8": {"quant_method": "mxfp8"},
    "modelopt_mxfp8": {"quant_method": "modelopt_mxfp8"},
    "ModelOpt": {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    "compressed-tensors": {
        **compressed(strategy="group", group_size=32)["quantization_config"],
        "format": "mxfp8-quantized",
    },
    "compressed-tensors by dtype": compressed(strategy="group", group_size=32, scale_dtype="torch.uint8")[
        "quantization_config"
    ],
    "Quark": quark(dtype="fp8_e4m3", qscheme="per_group", group_size=32, scale_format="e8m0")["quantization_config"],
    "scale_fmt": {"quant_method": "fp8", "scale_fmt": "ue8m0"},
    "scale_dtype": {"quant_method": "fp8", "scale_dtype": "float8_e8m0fnu"},
    "packing_format": {"quant_method": "auto-round", "packing_format": "auto_round:mxfp8"},
}


@pytest.mark.parametrize("stated", EXPONENTS)
def test_whatever_states_mx_makes_bytes_exponents(tmp_path: Path, stated: str) -> None:
    tensors: dict[str, Tensor] = {"l.weight": WEIGHT, "l.weight_scale": ("U8", (64, 2), 120)}
    plan = plan_of(tmp_path, tensors, config={"quantization_config": EXPONENTS[stated]})
    assert (plan.refusals, plan.unscaled) == ((), ())
    assert "l.weight_scale" in plan.operations


@pytest.mark.parametrize(
    ("value", "block"),
    [
        ([128, 64], (128, 64)),
        ("128x64", (128, 64)),
        ([1, 1, 32], (1, 32)),
        ([2, 1, 32], None),
        ([128], None),
        ("128", None),
        (128, None),
        ([True, 2], None),
        ([0, 2], None),
        (None, None),
    ],
)
def test_what_is_a_block(value: object, block: tuple[int, int] | None) -> None:
    assert as_block(value) == block


@pytest.mark.parametrize(
    ("config", "is_fp8"),
    [
        ({"quant_method": "fp8"}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, True),
        ({"quant_method": "auto-round", "data_type": "fp8"}, True),
        ({"type": "float", "num_bits": 8}, True),
        ({"dtype": "fp8_e4m3"}, True),
        ({"type": "int", "num_bits": 8}, False),
        ({"quant_method": "w4afp8"}, False),
        ({"quant_algo": "W4A8_AWQ"}, False),
        ({"quant_algo": "NVFP4"}, False),
        ({"quant_method": "gptq", "bits": 8}, False),
        ({}, False),
    ],
)
def test_what_states_fp8(config: dict[str, Any], is_fp8: bool) -> None:
    assert states_fp8(config) == is_fp8


def test_a_plain_fp8_config_states_no_exponents() -> None:
    assert not states_exponents({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]})


WIDE: Tensor = ("F8_E4M3", (576, 384), 0x7E)
WIDE_GRID: Tensor = ("F32", (5, 3), ONE_F32 * 15)
"""Blocks of 116 to 143 rows give this grid as well: nobody can tell from shapes."""


def fp8_blocks(rows: int) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": [rows, 128]}


@pytest.mark.parametrize(
    ("config", "side", "names"),
    [
        (
            {"quantization_config": fp8_blocks(128)},
            fp8_blocks(120),
            "config.json states blocks of 128x128 and quant.json",
        ),
        (
            {"a": {"quantization_config": fp8_blocks(128)}, "b": {"quantization_config": fp8_blocks(120)}},
            {},
            "config.json (a) states blocks of 128x128 and config.json (b) of 120x128",
        ),
        (
            {"quantization_config": fp8_blocks(128), "compression_config": fp8_blocks(120)},
            {},
            "config.json states blocks of 128x128 and config.json of 120x128",
        ),
    ],
)
def test_two_configs_that_contradict_one_another_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], side: dict[str, Any], names: str
) -> None:
    tensors = {"l.weight": WIDE, "l.weight_scale_inv": WIDE_GRID, "s.weight": WEIGHT, "s.weight_scale": GRID_OF_ONE}
    write_file(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quant.json").write_text(json.dumps(side))
    (refusal,) = plan_conversion(open_checkpoint(tmp_path), Options()).refusals
    assert names in refusal
    assert "the same 1 weights, 'l.weight'," in refusal
    assert "--block 'l.weight=128x128'" in refusal
    decided = plan_conversion(open_checkpoint(tmp_path), Options(blocks=("l.*=120x128",)))
    assert decided.refusals == ()
    assert {weight.quantized.weight: weight.quantized.block for weight in decided.weights}["l.weight"] == (120, 128)


GRID_OF_ONE: Tensor = ("F32", (1, 1), ONE_F32)


@pytest.mark.parametrize(
    "side",
    [
        fp8_blocks(128),
        {"quantization": {"quant_algo": "FP8_BLOCK_SCALES"}},
        fp8_blocks(64),
        {"quant_method": "fbgemm_fp8"},
        {"quant_method": "compressed-tensors", "config_groups": {}},
    ],
    ids=["the same", "the same in other words", "another grid", "rows", "nothing"],
)
def test_configs_that_do_not_contradict_one_another_are_fine(tmp_path: Path, side: dict[str, Any]) -> None:
    tensors = {"l.weight": WIDE, "l.weight_scale_inv": WIDE_GRID}
    config = {"quantization_config": fp8_blocks(128)}
    assert block_of(tmp_path, tensors, config=config, hf_quant_config=side) == (128, 128)


def test_a_wrapper_in_the_name_decides_between_configs(tmp_path: Path) -> None:
    config = {"vision": {"quantization_config": fp8_blocks(120)}, "text": {"quantization_config": fp8_blocks(128)}}
    tensors = {"text.l.weight": WIDE, "text.l.weight_scale_inv": WIDE_GRID}
    assert block_of(tmp_path, tensors, config=config) == (128, 128)
