"""What lies beside an fp8 weight besides its scale, fp8 under another dtype, and what the user states by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from deepinfer_prep import Options, convert_checkpoint, verify_checkpoint
from deepinfer_prep.cli.main import main
from deepinfer_prep.files.checkpoint import open_checkpoint
from deepinfer_prep.planning.plan import Operation, Plan, plan_conversion
from tests.families.raw import read_file
from tests.raises import raises_code
from tests.small_files import ONE_F32, WEIGHT, Tensor, write_config, write_file

F32: Tensor = ("F32", (), ONE_F32)
PAIR: dict[str, Tensor] = {"l.weight": WEIGHT, "l.weight_scale": F32}


def plan_of(folder: Path, tensors: dict[str, Tensor], options: Options | None = None, **quantization: Any) -> Plan:
    write_file(folder / "model.safetensors", tensors)
    if quantization:
        write_config(folder, **quantization)
    return plan_conversion(open_checkpoint(folder), options or Options())


FACTORS = [
    *("weight_scale_2", "weight_global_scale", "global_scale", "smooth_scale", "pre_quant_scale", "weight_scale_inv_2"),
    *("smooth_factor", "input_smooth", "prequant_scaling_factor"),
]


@pytest.mark.parametrize("name", FACTORS)
def test_a_further_factor_is_kept_and_the_doubled_scale_is_named(tmp_path: Path, name: str) -> None:
    plan = plan_of(tmp_path, {**PAIR, f"l.{name}": F32})
    assert plan.refusals == ()
    assert set(plan.operations) == {"l.weight", "l.weight_scale"}
    (told,) = [text for text in plan.warnings if "further factors" in text]
    assert f"of l.{name} and l.weight_scale only the latter is doubled" in told


@pytest.mark.parametrize("name", ["weight_scl", "weight_qparam", "weight_g_idx", "weight_scale_delta", "quant_state"])
def test_an_unknown_part_is_refused_by_name_and_copied_where_the_user_confirms(tmp_path: Path, name: str) -> None:
    tensors = {**PAIR, f"l.{name}": F32}
    (reason,) = plan_of(tmp_path, tensors).refusals
    assert "what they mean is not known" in reason
    assert f"'l.{name}'" in reason
    confirmed = plan_of(tmp_path, tensors, Options(maps=("*.weight=*.weight_scale",)))
    assert confirmed.refusals == ()
    assert any(f"l.{name}" in text for text in confirmed.warnings)


@pytest.mark.parametrize(
    "name", ["experts.up_proj_zero_point", "experts.up_proj_weight_zp", "experts.up_proj.weight_offset"]
)
def test_parts_of_stacked_experts_are_found(tmp_path: Path, name: str) -> None:
    tensors: dict[str, Tensor] = {"experts.up_proj": ("F8_E4M3", (2, 4, 4), 1), "experts.up_proj_scale": F32, name: F32}
    assert plan_of(tmp_path, tensors).zero_points == (name,)


@pytest.mark.parametrize("name", ["bias", "input_scale_ub", "weight_shape", "lora_A"])
def test_what_has_no_part_in_it_is_not_mentioned(tmp_path: Path, name: str) -> None:
    plan = plan_of(tmp_path, {**PAIR, f"l.{name}": F32})
    assert plan.refusals == ()
    assert not any(f"l.{name}" in text for text in plan.warnings)


def test_parts_of_weights_that_are_not_halved_are_left_alone(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {**PAIR, "i.weight": ("I8", (4, 4), 1), "i.weight_scale": F32, "i.weight_zp": F32}
    plan = plan_of(tmp_path, tensors)
    assert (plan.refusals, plan.zero_points) == ((), ())


def test_recorded_largest_values_are_told(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {**PAIR, "l.weight_quantizer._amax": F32})
    assert plan.refusals == ()
    assert any("l.weight_quantizer._amax" in text and "recorded" in text for text in plan.warnings)


BYTES: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "MLX": ({"l.weight": ("U8", (64, 64), 1), "l.weight_scale_inv": F32}, {"quant_method": "fp8"}),
    "int8 bytes": ({"l.weight": ("I8", (64, 64), 1), "l.weight_scale": F32}, {"quant_method": "fp8"}),
    "Transformer Engine": (
        {"l.weight._data": ("U8", (64, 64), 1), "l.weight._scale_inv": F32},
        {"quant_method": "fp8"},
    ),
    "ModelOpt": ({"l.weight": ("U8", (64, 64), 1), "l.weight_scale": F32}, {"quant_algo": "FP8"}),
    "Mistral": ({"l.weight": ("U8", (64, 64), 1), "l.qscale_weight": F32}, {"qformat_weight": "fp8_e4m3"}),
    "stacked experts": (
        {"experts.w": ("U8", (2, 64, 64), 1), "experts.w_weight_scale": ("F32", (2, 1, 1), ONE_F32 * 2)},
        {"quant_method": "fp8"},
    ),
    "blocks": (
        {"l.weight": ("U8", (64, 64), 1), "l.weight_scale_inv": ("F32", (2, 2), ONE_F32 * 4)},
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
    ),
    "MX": ({"l.weight": ("U8", (64, 64), 1), "l.weight_scale": ("U8", (64, 2), 127)}, {"quant_method": "mxfp8"}),
    "beside weights that have the dtype": (
        {**PAIR, "m.weight": ("U8", (64, 64), 1), "m.weight_scale": F32},
        {"quant_method": "fp8"},
    ),
}


@pytest.mark.parametrize("case", BYTES)
def test_fp8_under_another_dtype_is_refused_by_name(tmp_path: Path, case: str) -> None:
    tensors, config = BYTES[case]
    (reason,) = plan_of(tmp_path, tensors, **config).refusals
    assert "the config calls them fp8" in reason
    assert "Another program has stored fp8 codes as plain bytes" in reason


NOT_FP8: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "int8": (
        {"l.weight": ("I8", (64, 64), 1), "l.weight_scale": F32},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "int", "num_bits": 8}}}},
    ),
    "fp4 of DeepSeek-V4": (
        {"l.weight": ("I8", (64, 32), 1), "l.scale": ("F8_E8M0", (64, 2), 127)},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "MXFP4": (
        {"l.weight": ("U8", (64, 64), 1), "l.weight_scale": ("U8", (64, 4), 127)},
        {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "qscheme": "per_group"}}},
    ),
    "int4": (
        {"l.weight": ("I8", (128, 64), 1), "l.weight_scale_inv": ("F32", (128, 1), ONE_F32 * 128)},
        {"quant_method": "w4afp8", "group_size": 128},
    ),
    "bytes without a scale": ({"l.weight": ("U8", (64, 64), 1)}, {"quant_method": "fp8"}),
    "an int8 layer beside fp8": (
        {**PAIR, "i.weight": ("I8", (64, 64), 1), "i.weight_scale": F32},
        {"quant_method": "fp8"},
    ),
}


NOT_FP8["the bitmask of a sparse weight"] = (
    {"l.compressed": ("F8_E4M3", (64, 32), 0x7E), "l.bitmask": ("U8", (64, 8), 0x0F), "l.weight_scale": F32},
    {
        "quant_method": "compressed-tensors",
        "config_groups": {"g": {"weights": {"type": "float", "num_bits": 8, "strategy": "tensor"}}},
    },
)


def test_the_values_of_a_sparse_weight_are_halved_and_its_bitmask_is_copied(tmp_path: Path) -> None:
    tensors, config = NOT_FP8["the bitmask of a sparse weight"]
    plan = plan_of(tmp_path / "source", tensors, **config)
    (weight,) = plan.weights
    assert (weight.quantized.weight, weight.quantized.scale) == ("l.compressed", "l.weight_scale")
    result = convert_checkpoint(tmp_path / "source", tmp_path / "out")
    assert result.kernel_scales == {
        "a sparse weight holds only the values that are not zero, which no kernel here takes": 1
    }
    found = read_file(tmp_path / "out" / "model.safetensors")
    assert found["l.bitmask"].data == b"\x0f" * 512
    assert found["l.compressed"].data == b"\x76" * 2048


@pytest.mark.parametrize(("code", "is_zero"), [(0x00, True), (0x80, True), (0x01, False), (0x7F, False)])
def test_a_zero_point_in_fp8_has_to_be_zero_like_any_other(tmp_path: Path, code: int, is_zero: bool) -> None:
    """Older llm-compressors write it in the weight's dtype; it is no weight without a scale."""
    point: Tensor = ("F8_E4M3", (64, 1), bytes(63) + bytes([code]))
    plan = plan_of(tmp_path / "source", {**PAIR, "l.weight_zero_point": point})
    assert plan.refusals == ()
    assert plan.unscaled == ()
    if not is_zero:
        with raises_code("bad-value"):
            convert_checkpoint(tmp_path / "source", tmp_path / "out")
        return
    convert_checkpoint(tmp_path / "source", tmp_path / "out")
    assert verify_checkpoint(tmp_path / "out", source=tmp_path / "source").ok
    found = read_file(tmp_path / "out" / "model.safetensors")
    assert found["l.weight_zero_point"].data == point[2]


@pytest.mark.parametrize("case", NOT_FP8)
def test_bytes_that_are_no_fp8_are_copied(tmp_path: Path, case: str) -> None:
    tensors, config = NOT_FP8[case]
    assert plan_of(tmp_path, tensors, **config).refusals == ()


def test_a_config_that_says_fp8_of_weights_in_bf16_is_told(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"l.weight": ("BF16", (4, 4), 1), "l.weight_scale_inv": F32}, quant_method="fp8")
    assert plan.refusals == ()
    assert any("the config says fp8, but no tensor is" in text for text in plan.warnings)


def test_scales_repeated_beside_the_shards_are_told(tmp_path: Path) -> None:
    write_file(tmp_path / "act_scales.safetensors", {"l.weight_scale": F32, "m.input_scale": F32})
    plan = plan_of(tmp_path, PAIR)
    assert any("act_scales.safetensors is copied as it is and repeats 1 scales" in text for text in plan.warnings)


@pytest.mark.parametrize("name", ["kv_cache_scales.json", "quantized/kv_cache_scales.json"])
def test_a_file_of_cache_scales_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text('{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.02}}}}')
    plan = plan_of(tmp_path, PAIR)
    assert any(text.startswith(f"{name} is copied as it is: its scales fit a KV cache") for text in plan.warnings)


COVERED = {
    "TensorRT-LLM": ["l.activation_scaling_factor", "attention.kv_cache_scaling_factor"],
    "vLLM's mappings": ["self_attn.prob_output_scale", "k_proj.output_scale", "qkv_proj.k_scale", "attn.v_cache_scale"],
    "Mistral": ["l.qscale_act", "attention.k_fake_quantizer.qscale_act"],
    "others": ["l.input_scaling_factor", "l.input_activation_scale", "attn.kv_cache_scale"],
}


@pytest.mark.parametrize("case", COVERED)
def test_every_name_of_a_static_scale_is_doubled(tmp_path: Path, case: str) -> None:
    plan = plan_of(tmp_path, PAIR | dict.fromkeys(COVERED[case], F32))
    assert sorted(plan.activation_scales) == sorted(COVERED[case])
    assert all(plan.operations[name] is Operation.DOUBLE for name in COVERED[case])


CACHES: list[tuple[dict[str, Any], bool]] = [
    ({"kv_cache_scheme": {"type": "float", "num_bits": 8}}, True),
    ({"kv_cache_scheme": {"type": "int", "num_bits": 8}}, False),
    ({"kv_cache_scheme": {"type": "float", "num_bits": 4}}, False),
    ({"kv_cache_scheme": "static"}, True),
    ({"kv_cache_quant_algo": "FP8"}, True),
    ({"kv_cache_quant_algo": "INT8"}, False),
    ({"kv_cache_quant_algo": "NVFP4"}, False),
    ({"kv_cache_quant_config": {"*k_proj": {"output_tensors": {"dtype": "fp8_e4m3"}}}}, True),
    ({"kv_cache_quant_config": {"*k_proj": {"output_tensors": {"dtype": "int8"}}}}, False),
    ({}, True),
]


@pytest.mark.parametrize(("cache", "doubled"), CACHES)
def test_scales_of_a_cache_are_doubled_where_the_cache_is_fp8(
    tmp_path: Path, cache: dict[str, Any], doubled: bool
) -> None:
    plan = plan_of(tmp_path, {**PAIR, "attn.k_scale": F32}, quant_method="fp8", **cache)
    assert ("attn.k_scale" in plan.activation_scales) == doubled


def test_an_fp8_cache_beside_weights_in_bf16_counts_only_where_the_config_says_so(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {"l.weight": ("BF16", (4, 4), 1), "attn.k_scale": F32, "l.input_scale": F32}
    assert plan_of(tmp_path, tensors).activation_scales == ()
    stated = plan_of(tmp_path, tensors, quant_algo=None, kv_cache_quant_algo="FP8")
    assert stated.activation_scales == ("attn.k_scale",)


def test_comfyui_says_mx_in_the_header_or_in_a_tensor(tmp_path: Path) -> None:
    text = json.dumps({"format": "mxfp8"}).encode()
    scale: Tensor = ("U8", (64, 2), 120)
    said: Tensor = ("U8", (len(text),), text)
    in_tensor = plan_of(tmp_path / "a", {"x.weight": WEIGHT, "x.weight_scale": scale, "x.comfy_quant": said})
    metadata = {"_quantization_metadata": json.dumps({"layers": {"x": {"format": "mxfp8"}}})}
    (tmp_path / "b").mkdir()
    write_file(tmp_path / "b" / "model.safetensors", {"x.weight": WEIGHT, "x.weight_scale": scale}, metadata)
    in_header = plan_conversion(open_checkpoint(tmp_path / "b"), Options())
    for plan in (in_tensor, in_header):
        assert (plan.refusals, plan.family) == ((), "comfyui")
        assert plan.operations["x.weight_scale"] is Operation.DOUBLE
        assert plan.weights[0].quantized.block is None, "the order of these scales is that of another device"


def test_a_map_may_say_that_bytes_are_exponents(tmp_path: Path) -> None:
    source, output = tmp_path / "source", tmp_path / "output"
    write_file(source / "model.safetensors", {"l.weight": WEIGHT, "l.weight_scale": ("U8", (64, 2), 120)})
    (reason,) = plan_conversion(open_checkpoint(source), Options()).refusals
    assert "--map '*.weight=*.weight_scale:e8m0'" in reason
    options = Options(maps=("*.weight=*.weight_scale:e8m0",), blocks=("*.weight=1x32",))
    convert_checkpoint(source, output, options=options)
    assert set(read_file(output / "model.safetensors")["l.weight_scale"].data) == {121}
    assert verify_checkpoint(output, source=source).ok


@pytest.mark.parametrize("text", ["", "a", "a=", "=1x2", "a=1", "a=0x2", "a=1x2x3", "a=-1x2"])
def test_blocks_of_another_form_are_wrong_usage(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="WEIGHT=ROWSxCOLUMNS"):
        Options(blocks=(text,))
    assert CliRunner().invoke(main, ["inspect", str(tmp_path), "--block", text]).exit_code == 2


def test_a_block_stated_by_hand_counts_before_any_config(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {"l.weight": WEIGHT, "l.weight_scale": ("F32", (2, 2), ONE_F32 * 4)}
    assert plan_of(tmp_path, tensors).weights[0].quantized.block is None
    stated = plan_of(tmp_path, tensors, Options(blocks=("l.weight=32x32",)))
    assert stated.weights[0].quantized.block == (32, 32)
    config = {"quant_method": "fp8", "weight_block_size": [33, 33]}
    assert plan_of(tmp_path, tensors, Options(blocks=("*=32x32",)), **config).weights[0].quantized.block == (32, 32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m.*=32x32", "--block m.*=32x32 matches no F8_E4M3 tensor that has a scale"),
        ("*=16x16", "blocks of 16x16 are stated and give a grid of [4, 4], but the scale has [2, 2]"),
    ],
)
def test_a_block_that_fits_nothing_is_refused(tmp_path: Path, text: str, message: str) -> None:
    tensors: dict[str, Tensor] = {"l.weight": WEIGHT, "l.weight_scale": ("F32", (2, 2), ONE_F32 * 4)}
    (reason,) = plan_of(tmp_path, tensors, Options(blocks=(text,))).refusals
    assert message in reason


EXPERTS = [
    *("experts.up_proj_scale", "experts.up_proj_weight_scale", "experts.up_proj_scale_inv"),
    *("experts.up_proj_weight_scale_inv",),
]


@pytest.mark.parametrize("scale", EXPERTS)
@pytest.mark.parametrize("module", ["mlp.", "feed_forward.", "block_sparse_moe.", ""])
def test_the_relatives_of_a_stacked_experts_scale_are_paired(tmp_path: Path, module: str, scale: str) -> None:
    tensors: dict[str, Tensor] = {f"{module}experts.up_proj": ("F8_E4M3", (2, 4, 4), 1), f"{module}{scale}": F32}
    plan = plan_of(tmp_path, tensors)
    assert plan.refusals == ()
    assert [found.quantized.scale for found in plan.weights] == [f"{module}{scale}"]
