"""Finding scales: what is ambiguous, unknown or contradictory is refused or reported."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_prep import convert_checkpoint
from deepinfer_prep.families import read_layout
from deepinfer_prep.families.protocol import Layout
from deepinfer_prep.files.checkpoint import open_checkpoint
from deepinfer_prep.kernel_scale import Absent
from deepinfer_prep.options import Options
from deepinfer_prep.planning.plan import Operation, Plan, plan_conversion
from tests.families.raw import read_file
from tests.small_files import ONE_F32, SCALE, WEIGHT, Tensor, write_config, write_file

F32: Tensor = ("F32", (), ONE_F32)
GRID: Tensor = ("F32", (1, 1), ONE_F32)


def plan_of(
    folder: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None, **quantization: Any
) -> Plan:
    write_file(folder / "model.safetensors", tensors, metadata)
    if quantization:
        write_config(folder, **quantization)
    return plan_conversion(open_checkpoint(folder), Options())


def pairs(plan: Plan) -> dict[str, str]:
    return {weight.quantized.weight: weight.quantized.scale for weight in plan.weights}


def test_a_checkpoint_without_anything_quantized_has_no_family(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"l.weight": ("BF16", (4, 4), 1)})
    assert read_layout(open_checkpoint(tmp_path)) == Layout("unknown")


TWO_SCALES = [
    {"l.weight_scale": F32, "l.weight_scale_inv": F32},
    {"l.scale": SCALE, "l.weight_scale": F32},
    {"l.scale": SCALE, "l.weight_scale_inv": F32},
    {"l.qscale_weight": F32, "l.weight_scale": F32},
    {"l.scale_weight": F32, "l.weight_scale": F32},
    {"l.scale": GRID, "l.weight_scale_inv": F32},
]


@pytest.mark.parametrize("scales", TWO_SCALES)
def test_two_possible_scales_are_refused(tmp_path: Path, scales: dict[str, Tensor]) -> None:
    plan = plan_of(tmp_path, {"l.weight": WEIGHT, **scales, "k.weight": WEIGHT, "k.scale": SCALE})
    (message,) = plan.refusals
    assert message.startswith("F8_E4M3 tensors that have more than one tensor that could be their scale")
    assert all(f"`{name.partition('.')[2]}`" in message for name in scales)
    assert pairs(plan) == {"k.weight": "k.scale"}


DIVIDING: list[Tensor] = [
    F32,
    ("F32", (1,), ONE_F32),
    ("F32", (64, 1), ONE_F32 * 64),
    ("BF16", (64,), b"\x80\x3f" * 64),
]


@pytest.mark.parametrize("scale", DIVIDING)
def test_a_float_scale_that_may_divide_is_refused(tmp_path: Path, scale: Tensor) -> None:
    plan = plan_of(tmp_path, {"l.weight": WEIGHT, "l.scale": scale})
    (message,) = plan.refusals
    assert "have a float tensor `scale` beside them that may multiply or divide" in message
    assert "--map '*.weight=*.scale'" in message
    mapped = plan_conversion(open_checkpoint(tmp_path), Options(maps=("*.weight=*.scale",)))
    assert (mapped.refusals, pairs(mapped)) == ((), {"l.weight": "l.scale"})


def test_a_float_scale_in_the_grid_of_the_stated_blocks_multiplies(tmp_path: Path) -> None:
    grid: Tensor = ("F32", (4, 2), ONE_F32 * 8)
    tensors: dict[str, Tensor] = {"l.weight": ("F8_E4M3", (64, 64), 1), "l.scale": grid}
    assert "may multiply or divide" in plan_of(tmp_path / "a", tensors).refusals[0]
    plan = plan_of(tmp_path / "b", tensors, weight_block_size=[16, 32])
    assert plan.refusals == ()
    assert plan.weights[0].quantized.block == (16, 32)


@pytest.mark.parametrize("dtype", ["I32", "I8", "F8_E5M2", "BOOL", "F8_E4M3"])
def test_a_scale_of_no_scale_dtype_is_refused(tmp_path: Path, dtype: str) -> None:
    plan = plan_of(
        tmp_path, {"l.weight": WEIGHT, "l.weight_scale": (dtype, (1, 1), 1 if dtype != "I32" else b"\1\0\0\0")}
    )
    assert any(f"have a scale `weight_scale` of dtype {dtype}" in message for message in plan.refusals)


@pytest.mark.parametrize("dtype", ["F8_E4M3FNUZ", "F8_E5M2FNUZ"])
def test_fnuz_is_refused(tmp_path: Path, dtype: str) -> None:
    plan = plan_of(tmp_path, {"l.weight": (dtype, (64, 64), 1), "l.weight_scale": F32})
    assert any("fnuz fp8 dtype: 'l.weight'" in message for message in plan.refusals)


def test_a_scale_of_halved_and_unhalved_weights_at_once_is_refused(tmp_path: Path) -> None:
    write_file(
        tmp_path / "model.safetensors",
        {"l.weight": ("I8", (64, 32), 1), "l.scale": ("F8_E8M0", (64, 2), 127), "m": WEIGHT},
    )
    plan = plan_conversion(open_checkpoint(tmp_path), Options(maps=("m=l.scale",)))
    assert any("it cannot be doubled for one of them only" in message for message in plan.refusals)


@pytest.mark.parametrize("other", ["BF16", "I8", "U8", "F8_E5M2"])
def test_a_shared_scale_counts_only_where_every_part_is_fp8(tmp_path: Path, other: str) -> None:
    parts: dict[str, Tensor] = {"t.shards.0.weight": WEIGHT, "t.weight_scale": F32}
    assert pairs(plan_of(tmp_path / "a", parts)) == {"t.shards.0.weight": "t.weight_scale"}
    plan = plan_of(tmp_path / "b", {**parts, "t.shards.1.weight": (other, (4, 4), 1)})
    assert pairs(plan) == {}
    assert "look like a scale: t.weight_scale" in plan.refusals[0]


def test_a_shared_scale_has_to_be_one_value(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"t.shard_0.weight": WEIGHT, "t.weight_scale": ("F32", (64, 1), ONE_F32 * 64)})
    assert pairs(plan) == {}


def test_a_table_with_scales_of_both_kinds_is_refused(tmp_path: Path) -> None:
    tensors = {"t.shards.0.weight": WEIGHT, "t.shards.0.weight_scale": F32, "t.weight_scale": F32}
    assert "more than one tensor that could be their scale" in plan_of(tmp_path, tensors).refusals[0]


def test_a_scale_named_like_its_weight_in_a_hyper_connection_is_left_alone(tmp_path: Path) -> None:
    """A rename of `.scale` that also caught a hyper-connection's."""
    tensors: dict[str, Tensor] = {
        "l.weight": WEIGHT,
        "l.weight_scale_inv": SCALE,
        "attn_hc.weight_scale_inv": ("F32", (3,), ONE_F32 * 3),
        "attn_hc.scale": ("F32", (3,), ONE_F32 * 3),
        "norm.scale": ("BF16", (64,), 1),
    }
    plan = plan_of(tmp_path, tensors)
    assert plan.refusals == ()
    assert set(plan.operations) == {"l.weight", "l.weight_scale_inv"}


@pytest.mark.parametrize("name", ["input_scale_ub", "weight_scale_2", "attn_scale", "logit_scale", "input_scales"])
def test_other_tensors_with_scale_in_their_name_are_left_alone(tmp_path: Path, name: str) -> None:
    plan = plan_of(tmp_path, {"l.weight": WEIGHT, "l.weight_scale": F32, f"l.{name}": F32})
    assert set(plan.operations) == {"l.weight", "l.weight_scale"}
    assert plan.activation_scales == ()


ALONE = ["attn.k_scale", "attn.v_scale", "k_proj.k_scale", "attn.q_scale", "attn.kv_scale", "attn.prob_scale"]


@pytest.mark.parametrize("name", [*ALONE, "l.input_scale", "l.act_scale", "l.activation_scale", "l.output_scale"])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_static_scales_are_known_by_their_names(tmp_path: Path, name: str, dtype: str) -> None:
    plan = plan_of(tmp_path, {"l.weight": WEIGHT, "l.weight_scale": F32, name: (dtype, (1,), 1)})
    assert plan.activation_scales == (name,)
    assert plan.operations[name] is Operation.DOUBLE


def torchao_metadata(kind: str, data: Any = None) -> dict[str, str]:
    parts = {"_type": kind, "_data": data, "_tensor_data_names": ["qdata", "scale"]}
    return {"format": "pt", "l.weight": json.dumps(parts), "tensor_names": '["l.weight"]'}


def test_torchao_types_that_are_not_known_to_multiply_are_refused(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {"l._weight_qdata": WEIGHT, "l._weight_scale": F32}
    plan = plan_of(tmp_path, tensors, torchao_metadata("Float8TrainingTensor"))
    assert "belong to a torchao Float8TrainingTensor" in plan.refusals[0]


def test_torchao_without_a_scale_or_with_fp8_scales_is_refused(tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "a", {"l._weight_qdata": WEIGHT}, torchao_metadata("Float8Tensor"))
    assert "belong to a torchao Float8Tensor without a scale" in plan.refusals[0]
    tensors: dict[str, Tensor] = {"l._weight_qdata": ("U8", (64, 32), 1), "l._weight_scale": ("F8_E4M3", (64, 4), 1)}
    plan = plan_of(tmp_path / "b", tensors, torchao_metadata("NVFP4Tensor"))
    assert "are parts of a torchao NVFP4Tensor other than its values" in plan.refusals[0]


@pytest.mark.parametrize("metadata", [None, {"tensor_names": "not json"}, {"tensor_names": "[]", "l.weight": "[1"}])
def test_torchao_names_without_its_metadata_are_refused(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    plan = plan_of(tmp_path, {"l._weight_qdata": WEIGHT, "l._weight_scale": F32}, metadata)
    assert "have no scale (1): 'l._weight_qdata'" in plan.refusals[0]
    assert "l._weight_scale" in plan.refusals[0]


def compressed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8, **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def test_groups_of_module_classes_that_disagree_leave_the_block_open(tmp_path: Path) -> None:
    """A class cannot be told from tensor names; a group that names the module decides."""
    config = compressed(strategy="tensor")
    other = {"targets": ["Embedding"], "weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}
    config["config_groups"]["group_1"] = other
    tensors: dict[str, Tensor] = {"l.weight": WEIGHT, "l.weight_scale": F32}
    plan = plan_of(tmp_path, tensors, **config)
    assert plan.weights[0].quantized.block_problem == "the config does not say which of its schemes covers this weight"
    config["config_groups"]["group_0"]["targets"] = ["l"]
    assert plan_of(tmp_path, tensors, **config).weights[0].quantized.block == (64, 64)


def test_groups_whose_scales_lie_alike_cover_the_modules_of_each(tmp_path: Path) -> None:
    config = compressed(strategy="tensor")
    tensor = config["config_groups"]["group_0"]["weights"]
    config["config_groups"] = {
        "first": {"targets": ["a"], "weights": tensor},
        "other": {"targets": ["b"], "weights": {**tensor, "strategy": "channel"}},
        "alike": {"targets": ["re:c.*"], "weights": {**tensor, "dynamic": False}},
    }
    rows: Tensor = ("F32", (64,), ONE_F32 * 64)
    tensors: dict[str, Tensor] = {f"{module}.weight": WEIGHT for module in ("a", "b", "c1")}
    tensors |= {"a.weight_scale": F32, "b.weight_scale": rows, "c1.weight_scale": F32}
    blocks = {found.quantized.weight: found.quantized.block for found in plan_of(tmp_path, tensors, **config).weights}
    assert blocks == {"a.weight": (64, 64), "b.weight": (1, 64), "c1.weight": (64, 64)}


@pytest.mark.parametrize("evidence", ["format", "scale_dtype"])
def test_compressed_tensors_states_exponents_by_format_or_dtype(tmp_path: Path, evidence: str) -> None:
    config = compressed(strategy="group", group_size=32)
    tensors: dict[str, Tensor] = {"l.weight": WEIGHT, "l.weight_scale": ("U8", (64, 2), 127)}
    assert plan_of(tmp_path, tensors, **config).refusals
    if evidence == "format":
        config["format"] = "mxfp8-quantized"
    else:
        config["config_groups"]["group_0"]["weights"]["scale_dtype"] = "torch.uint8"
    plan = plan_of(tmp_path, tensors, **config)
    assert (plan.refusals, plan.weights[0].quantized.block) == ((), (1, 32))


def test_weights_of_fewer_than_eight_bits_are_counted_and_told(tmp_path: Path) -> None:
    """Those alone that are copied: NVFP4's, whose scales are fp8 themselves, are refused instead."""
    packed: Tensor = ("U8", (64, 32), 1)
    tensors: dict[str, Tensor] = {
        "a.weight_packed": packed,
        "a.weight_scale": ("BF16", (64, 2), 1),
        "b.weight_packed": packed,
        "c.weight_packed": packed,
        "c.weight_scale": ("F8_E4M3", (64, 4), 1),
    }
    plan = plan_of(tmp_path, tensors, quant_method="compressed-tensors", format="pack-quantized", config_groups={})
    (told,) = [warning for warning in plan.warnings if "fewer than eight bits" in warning]
    assert told.startswith("2 weights are stored in fewer than eight bits (pack-quantized), a.weight_packed among them")
    plan = plan_of(tmp_path / "without", {"l.weight": ("BF16", (4, 4), 1)}, quant_method="compressed-tensors")
    assert not any("fewer than eight bits" in warning for warning in plan.warnings)


def test_a_vector_with_an_exponent_scale_is_converted_without_a_block(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"l.weight": ("F8_E4M3", (64,), 1), "l.scale": ("F8_E8M0", (2,), 127)})
    (weight,) = plan.weights
    assert (plan.refusals, weight.quantized.block) == ((), None)
    assert weight.quantized.block_problem == "the weight has the shape [64], which is not a matrix"


def test_only_a_marker_of_one_or_two_elements_is_a_marker(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {"x.weight": WEIGHT, "x.scale_weight": F32, "scaled_fp8": ("F8_E4M3", (2,), 0x7E)}
    assert plan_of(tmp_path / "a", tensors).refusals == ()
    plan = plan_of(tmp_path / "b", {**tensors, "scaled_fp8": ("F8_E4M3", (3,), 0x7E)})
    assert plan.unscaled == ("scaled_fp8",)


def quark(**scheme: Any) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": scheme}}


ROWS_64: Tensor = ("F32", (64, 1), ONE_F32 * 64)
DISAGREEING: list[tuple[dict[str, Any], Tensor, str]] = [
    (compressed(strategy="tensor"), ROWS_64, "the config says one value, but the scale has the shape [64, 1]"),
    (compressed(strategy="channel"), F32, "the config says one value a row, but the scale has the shape []"),
    (
        compressed(strategy="block", block_structure=[32, 32]),
        GRID,
        "blocks of 32x32 are stated and give a grid of [2, 2]",
    ),
    (compressed(strategy="group", group_size=32), ROWS_64, "blocks of 1x32 are stated and give a grid of [64, 2]"),
    (compressed(strategy="group"), F32, "the config's strategy 'group' is not one of"),
    (compressed(strategy="group", group_size=0), F32, "the config's strategy 'group' is not one of"),
    (compressed(strategy="group", group_size=True), ROWS_64, "the config's strategy 'group' is not one of"),
    (compressed(strategy="spiral"), F32, "the config's strategy 'spiral' is not one of"),
    (compressed(strategy="block", block_structure=[0, 32]), GRID, "the config's strategy 'block' is not one of"),
    ({"quant_method": "compressed-tensors"}, F32, "the config does not say which of its schemes covers this weight"),
    (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        ROWS_64,
        "quant_algo 'FP8' says one value, but",
    ),
    ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, ROWS_64, "blocks of 128x128 are stated"),
    (
        {"quant_method": "modelopt", "quant_algo": "W4A8"},
        F32,
        "quant_algo 'W4A8' does not say how",
    ),
    (quark(qscheme="per_tensor"), ROWS_64, "the config says one value, but"),
    (quark(qscheme="per_channel", ch_axis=0), F32, "the config says one value a row, but"),
    (quark(qscheme="per_channel", ch_axis=1), ROWS_64, "the config's qscheme 'per_channel' does not say"),
    (quark(qscheme="per_group", group_size=32), ROWS_64, "blocks of 1x32 are stated"),
    ({"quant_method": "fbgemm_fp8"}, F32, "the format has one scale a row, but the scale has the shape []"),
    (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        ("F32", (3, 2), ONE_F32 * 6),
        "blocks of 32x32 are stated",
    ),
    ({"quant_method": "fp8", "weight_block_size": "32"}, ("F32", (2, 2), ONE_F32 * 4), "nothing states the block size"),
]


@pytest.mark.parametrize(("config", "scale", "problem"), DISAGREEING)
def test_config_and_grid_that_disagree_are_reported_and_converted(
    tmp_path: Path, config: dict[str, Any], scale: Tensor, problem: str
) -> None:
    """Every scale value is a power of two here, so that nothing but the disagreement stands against a kernel scale."""
    plan = plan_of(tmp_path, {"l.weight": WEIGHT, "l.weight_scale": scale}, **config)
    assert plan.refusals == ()
    assert set(plan.operations) == {"l.weight", "l.weight_scale"}
    (weight,) = plan.weights
    assert weight.quantized.block is None
    assert isinstance(weight.kernel_scale, Absent)
    assert problem in weight.kernel_scale.reason
    assert any(problem in warning and "l.weight" in warning for warning in plan.warnings)


BLOCKS: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, int] | None]] = [
    ("one value", (96, 64), (), (96, 64)),
    ("one value", (96, 64), (1,), (96, 64)),
    ("one value", (96, 64), (1, 1), (96, 64)),
    ("one value a row", (96, 64), (96, 1), (1, 64)),
    ("one value a row, flat", (96, 64), (96,), (1, 64)),
    ("rows or columns", (64, 64), (64,), None),
    ("one value a column", (96, 64), (64,), None),
    ("one value a column", (96, 64), (1, 64), None),
    ("a row of a stack", (3, 96, 64), (3, 96, 1), (1, 64)),
    ("a matrix of a stack", (3, 96, 64), (3, 1, 1), (96, 64)),
    ("a stack without its matrices", (3, 96, 64), (3,), None),
    ("a vector", (96,), (), None),
    ("a vector", (96,), (96,), None),
    ("a scalar", (), (), None),
]


@pytest.mark.parametrize(("kind", "shape", "scale_shape", "block"), BLOCKS)
def test_shapes_that_can_mean_one_thing_only_need_no_config(
    tmp_path: Path, kind: str, shape: tuple[int, ...], scale_shape: tuple[int, ...], block: tuple[int, int] | None
) -> None:
    count = int(np.prod(scale_shape, dtype=int))
    scale: Tensor = ("F32", scale_shape, ONE_F32 * count)
    plan = plan_of(tmp_path, {"l.weight": ("F8_E4M3", shape, 1), "l.weight_scale": scale})
    assert plan.refusals == ()
    assert plan.weights[0].quantized.block == block, kind


@pytest.mark.parametrize("last", ["scale", "weight_scale_inv", "weight_scale"])
def test_a_scale_with_as_many_rows_as_its_weight_has_blocks_of_one_row(tmp_path: Path, last: str) -> None:
    """Whatever square block the config states: so it is in V4.1's engram tables."""
    dtype, content = ("F8_E8M0", 127) if last == "scale" else ("F32", ONE_F32 * 128)
    tensors: dict[str, Tensor] = {"l.weight": ("F8_E4M3", (64, 64), 1), f"l.{last}": (dtype, (64, 2), content)}
    plan = plan_of(tmp_path, tensors, weight_block_size=[32, 32])
    assert plan.weights[0].quantized.block == (1, 32)


def test_modelopts_layers_have_algorithms_of_their_own(tmp_path: Path) -> None:
    """The module's own entry, its nearest parent's, or none."""
    grid: Tensor = ("F32", (1, 1, 1, 1), ONE_F32)
    tensors = {
        f"{name}.weight{last}": tensor
        for name in ("a.q", "a.k", "b")
        for last, tensor in (("", WEIGHT), ("_scale", grid))
    }
    layers = {"a": {"quant_algo": "FP8"}, "a.q": {"quant_algo": "FP8_PB_WO"}}
    plan = plan_of(tmp_path, tensors, quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers)
    blocks = {weight.quantized.weight: weight.quantized.block for weight in plan.weights}
    assert blocks == {"a.q.weight": (128, 128), "a.k.weight": (64, 64), "b.weight": (64, 64)}


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model.", "transformer."])
@pytest.mark.parametrize(("last", "scale"), [("scale", SCALE), ("weight_scale_inv", F32), ("qscale_weight", F32)])
def test_prefixes_make_no_difference(tmp_path: Path, prefix: str, last: str, scale: Tensor) -> None:
    plan = plan_of(tmp_path, {f"{prefix}layers.0.q.weight": WEIGHT, f"{prefix}layers.0.q.{last}": scale})
    assert pairs(plan) == {f"{prefix}layers.0.q.weight": f"{prefix}layers.0.q.{last}"}


@pytest.mark.parametrize(
    "name", ["weight", "é.weight", "a b.weight", "..weight", ".weight", "a\n.weight", "../../x.weight"]
)
def test_unusual_names_are_paired_like_others(tmp_path: Path, name: str) -> None:
    plan = plan_of(tmp_path, {name: WEIGHT, name + "_scale": F32})
    assert (plan.refusals, pairs(plan)) == ((), {name: name + "_scale"})


def test_a_config_with_patterns_that_are_no_regular_expressions_is_no_crash(tmp_path: Path) -> None:
    config = compressed(strategy="tensor")
    config["config_groups"]["group_0"]["targets"] = ["re:[", 5, None]
    plan = plan_of(tmp_path, {"l.weight": WEIGHT, "l.weight_scale": F32}, **config)
    assert plan.refusals == ()


HOSTILE_CONFIGS: list[dict[str, Any]] = [
    {"quant_method": ["fp8"], "weight_block_size": {"a": 1}, "scale_fmt": 5},
    {"quant_method": "compressed-tensors", "config_groups": [1, 2]},
    {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": 3}}, "kv_cache_scheme": 7},
    {"quant_method": "modelopt", "quant_algo": {"x": 1}},
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": ["l"]},
    {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"l": 4}},
    {"quant_method": "quark", "global_quant_config": [], "layer_quant_config": {"*": None}},
    {"quant_method": "quark", "global_quant_config": {"weight": [{}, {}]}},
    {"quant_method": "fp8", "weight_block_size": [True, 32]},
    {"quant_method": "fp8", "weight_block_size": [-1, 0]},
]


@pytest.mark.parametrize("config", HOSTILE_CONFIGS)
def test_configs_of_any_shape_are_no_crash(tmp_path: Path, config: dict[str, Any]) -> None:
    plan = plan_of(tmp_path, {"l.weight": WEIGHT, "l.weight_scale": F32, "l.input_scale": F32}, **config)
    assert pairs(plan) == {"l.weight": "l.weight_scale"}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 200)
    | st.floats()
    | st.sampled_from(["fp8", "tensor", "re:(", "*", ""]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["weight", "weights", "l", "g"]), inner)
    ),
    max_leaves=6,
)
METHODS = ["fp8", "mxfp8", "compressed-tensors", "modelopt", "quark", "fbgemm_fp8", "torchao", "mxfp4"]
KEYS = [
    "weight_block_size",
    "scale_fmt",
    "config_groups",
    "format",
    "kv_cache_scheme",
    "quant_algo",
    "quantized_layers",
    "global_quant_config",
    "layer_quant_config",
]


@settings(deadline=None)
@given(method=st.sampled_from(METHODS) | JSON, config=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4))
def test_any_json_in_the_config_is_read_without_a_crash(method: Any, config: dict[str, Any]) -> None:
    """And the weight with its scale is paired by name, whatever the config says about blocks."""
    with tempfile.TemporaryDirectory() as folder:
        tensors: dict[str, Tensor] = {"l.weight": WEIGHT, "l.weight_scale": ROWS_64, "attn.k_scale": F32}
        plan = plan_of(Path(folder), tensors, **{"quant_method": method, **config})
        assert (plan.refusals, pairs(plan)) == ((), {"l.weight": "l.weight_scale"})


def test_one_file_alone_is_a_checkpoint(tmp_path: Path) -> None:
    write_file(tmp_path / "one.safetensors", {"l.weight": WEIGHT, "l.scale": SCALE})
    convert_checkpoint(tmp_path / "one.safetensors", tmp_path / "output")
    assert set(read_file(tmp_path / "output" / "one.safetensors")["l.scale"].data) == {128}
