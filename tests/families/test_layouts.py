"""The fixtures themselves: what safetensors, torch and plain arithmetic say of each family's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from tests.families.layouts import LAYOUTS, Layout, write_layout
from tests.families.raw import Stored, read_metadata, write_file
from tests.families.rules import Blocks, Experts, GroupedBlocks, Rows, Rule, SpreadBlocks, WholeTensor

TORCH_TYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Layout]:
    folder = tmp_path_factory.mktemp("layouts")
    return {name: write_layout(name, folder / name) for name in LAYOUTS}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest, written: dict[str, Layout]) -> Layout:
    return written[request.param]


def test_safetensors_and_torch_read_the_same_tensors(layout: Layout) -> None:
    loaded = {name: t for file in layout.files for name, t in load_file(layout.folder / file).items()}
    stored = layout.read()
    assert loaded.keys() == stored.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == TORCH_TYPES[stored[name].dtype], name
        assert tuple(tensor.shape) == stored[name].shape, name
        raw = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor
        assert raw.numpy().tobytes() == stored[name].data, name


def test_every_e4m3_tensor_is_accounted_for(layout: Layout) -> None:
    found = sorted(name for name, stored in layout.read().items() if stored.dtype == "F8_E4M3")
    weights = [weight.name for weight in layout.weights]
    assert found == sorted([*weights, *layout.unscaled, *layout.fp8_scales, *layout.markers])


def test_all_named_facts_exist(layout: Layout) -> None:
    names = set(layout.read())
    packed = {name for pair in layout.packed for name in pair}
    assert names >= {*layout.scales, *layout.activation_scales, *layout.mixing, *packed}
    for name in layout.mixing:
        assert layout.read()[name].dtype == "F32"


def test_weights_dequantize_to_their_source(layout: Layout) -> None:
    """Within half a step of e4m3: 2^-4 of the value, or 2^-10 of the scale below the normal values."""
    stored, values = layout.read(), layout.dequantize()
    for weight in layout.weights:
        step = weight.rule(np.ones(weight.source.shape), stored[weight.scale].values)
        bound = np.maximum(2.0**-4 * np.abs(weight.source), 2.0**-10 * step)
        error = np.abs(values[weight.name] - weight.source.reshape(step.shape))
        assert np.all(error <= bound * (1 + 1e-9)), weight.name


def test_codes_above_240_occur_and_none_is_nan(layout: Layout) -> None:
    stored = layout.read()
    if layout.weights:
        magnitudes = [int((stored[weight.name].codes & 0x7F).max()) for weight in layout.weights]
        assert 0x78 <= max(magnitudes) <= 0x7E
    assert all(np.all(np.isfinite(stored[scale].values)) for scale in layout.scales)


def test_layouts_without_fp8_weights_are_these(written: dict[str, Layout]) -> None:
    assert {name for name, layout in written.items() if not layout.weights} == {
        "diffusion_cast",
        "diffusion_cast_large",
        "diffusion_e5m2",
        "gpt_oss",
        "kimi_k2_thinking",
        "kimi_k3",
        "llama_nvfp4",
        "modelopt_nvfp4",
        "transformer_engine",
    }


def test_index_names_every_tensor_once(layout: Layout) -> None:
    index = layout.folder / "model.safetensors.index.json"
    if len(layout.files) == 1:
        assert not index.exists()
        return
    content = json.loads(index.read_text())
    found: dict[str, str] = {}
    for file in layout.files:
        with safe_open(layout.folder / file, "pt") as opened:
            found |= dict.fromkeys(opened.keys(), file)
    assert content["weight_map"] == found
    assert content["metadata"]["total_size"] == sum(len(stored.data) for stored in layout.read().values())


def test_config_is_what_the_layout_says(layout: Layout) -> None:
    written = [path for path in (layout.folder / "config.json", layout.folder / "params.json") if path.exists()]
    assert [json.loads(path.read_text()) for path in written] == [json.loads(json.dumps(layout.config))] * bool(written)
    assert written or not layout.config


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(layout: Layout, tmp_path: Path) -> None:
    again, other = write_layout(layout.name, tmp_path / "again"), write_layout(layout.name, tmp_path / "other", 1)
    for file in layout.files:
        assert (layout.folder / file).read_bytes() == (again.folder / file).read_bytes()
    assert layout.read() != other.read()


def test_released_grids_that_are_easy_to_get_wrong(written: dict[str, Layout]) -> None:
    shapes = {
        (name, tensor): stored.shape for name, layout in written.items() for tensor, stored in layout.read().items()
    }
    assert shapes["deepseek_v3", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == (2, 2)
    assert shapes["mimo_v25_pro", "model.layers.0.self_attn.qkv_proj.weight"] == (1696, 256)
    assert shapes["mimo_v25_pro", "model.layers.0.self_attn.qkv_proj.weight_scale_inv"] == (16, 2)
    assert shapes["minimax_m3", "model.layers.0.self_attn.q_proj.weight_scale_inv"] == (100, 8)
    assert shapes["deepseek_v4", "hc_head_fn"] == (4, 1024)
    assert shapes["modelopt_fp8_block", "model.layers.0.mlp.down_proj.weight_scale"] == (2, 1, 2, 1)
    assert shapes["modelopt_fp8_channel", "model.layers.0.mlp.down_proj.weight_scale"] == (256,)
    assert shapes["mistral_hf", "model.language_model.layers.0.mlp.down_proj.weight_scale_inv"] == ()


def test_released_mimo_grid() -> None:
    """[27136, 6144] in 8 ranges has 216 scale rows and [14848, 4096] in 4 ranges has 116."""
    assert GroupedBlocks(8).scale_shape((27136, 6144)) == (216, 48)
    assert GroupedBlocks(4).scale_shape((14848, 4096)) == (116, 32)


@pytest.mark.parametrize("name", ["deepseek_v31", "deepseek_v32", "deepseek_v4", "minimax_m3", "llama_mxfp8"])
def test_scales_of_some_families_are_powers_of_two(name: str, written: dict[str, Layout]) -> None:
    stored = written[name].read()
    for weight in written[name].weights:
        values = weight.rule(np.ones(weight.source.shape), stored[weight.scale].values)
        assert np.all(np.frexp(values)[0] == 0.5)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3", "glm_5", "llama_channel", "mimo_v25_pro"])
def test_scales_of_others_are_not(name: str, written: dict[str, Layout]) -> None:
    stored = written[name].read()
    assert all(np.any(np.frexp(stored[weight.scale].values)[0] != 0.5) for weight in written[name].weights)


@pytest.mark.parametrize("name", ["minimax_m2", "qwen38_ngram", "deepseek_v41", "kimi_k2"])
def test_scales_lie_in_other_files(name: str, written: dict[str, Layout]) -> None:
    layout = written[name]
    weight_map = json.loads((layout.folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(weight_map[weight.name] != weight_map[weight.scale] for weight in layout.weights)


def test_a_shared_scale_is_listed_once(written: dict[str, Layout]) -> None:
    layout = written["qwen38_ngram"]
    shared = [weight for weight in layout.weights if "shard_" in weight.name]
    assert len(shared) == 8
    assert len({weight.scale for weight in shared}) == 1
    assert len(layout.scales) == 2


def test_plain_casts_hold_codes_above_240_only_where_said(written: dict[str, Layout]) -> None:
    largest = {
        name: max(int((written[name].read()[t].codes & 0x7F).max()) for t in written[name].unscaled)
        for name in ("diffusion_cast", "diffusion_cast_large", "deepseek_v4_fp8_experts", "transformer_engine")
    }
    assert largest.pop("diffusion_cast") <= 0x77
    assert set(largest.values()) == {0x7E}


def test_e4m3_scales_reach_beyond_240(written: dict[str, Layout]) -> None:
    for name in ("modelopt_nvfp4", "modelopt_mixed", "llama_nvfp4"):
        stored = written[name].read()
        codes = np.concatenate([stored[scale].codes.ravel() for scale in written[name].fp8_scales])
        assert 0x78 <= codes.max() <= 0x7E


def test_torchao_metadata_names_the_parts(written: dict[str, Layout]) -> None:
    layout = written["torchao"]
    metadata = read_metadata(layout.folder / layout.files[0])
    assert metadata is not None
    for name in json.loads(metadata["tensor_names"]):
        parts = json.loads(metadata[name]).get("_tensor_data_names", [])
        module, leaf = name.rsplit(".", 1)
        assert all(f"{module}._{leaf}_{part}" in layout.read() for part in parts)


def test_block_rule_is_torch_repeat_interleave() -> None:
    codes, scale = torch.randn(200, 330, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64)
    expanded = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :330]
    np.testing.assert_array_equal(Rule(Blocks(128, 128))(codes.numpy(), scale.numpy()), (codes * expanded).numpy())


def test_spread_block_rule_is_the_block_rule() -> None:
    random = np.random.default_rng(0)
    codes, scale = random.standard_normal((130, 260)), random.random((2, 1, 3, 1))
    np.testing.assert_array_equal(Rule(SpreadBlocks())(codes, scale), Rule(Blocks(128, 128))(codes, scale[:, 0, :, 0]))


def test_stacked_block_rule_is_the_rule_of_each_expert() -> None:
    random = np.random.default_rng(0)
    codes, scale = random.standard_normal((3, 140, 130)), random.random((3, 2, 2))
    rule = Rule(Blocks(128, 128))
    np.testing.assert_array_equal(rule(codes, scale), [rule(c, s) for c, s in zip(codes, scale, strict=True)])


def test_grouped_rule_is_the_block_rule_of_each_range() -> None:
    random = np.random.default_rng(0)
    codes, scale = random.standard_normal((4 * 200, 256)), random.random((8, 2))
    parts = [Rule(Blocks(128, 128))(codes[200 * g : 200 * g + 200], scale[2 * g : 2 * g + 2]) for g in range(4)]
    np.testing.assert_array_equal(Rule(GroupedBlocks(4))(codes, scale), np.concatenate(parts))


def test_broadcasting_rules() -> None:
    random = np.random.default_rng(0)
    matrix, stack = random.standard_normal((5, 7)), random.standard_normal((3, 5, 7))
    rows, experts = random.random((5, 1)), random.random((3, 1, 1))
    np.testing.assert_array_equal(Rule(Rows())(matrix, rows), matrix * rows)
    np.testing.assert_array_equal(Rule(Rows(flat=True))(matrix, rows[:, 0]), matrix * rows)
    np.testing.assert_array_equal(Rule(Experts())(stack, experts), stack * experts)
    np.testing.assert_array_equal(Rule(WholeTensor())(matrix, np.float64(3)), matrix * 3)
    np.testing.assert_array_equal(Rule(Blocks(1, 32), exponents=True)(matrix, np.full((5, 1), 129)), matrix * 4)


def test_stored_rounds_as_ml_dtypes() -> None:
    values = np.linspace(-500, 500, 997)
    expected = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(Stored.of("F8_E4M3", values).codes, expected)


@pytest.mark.parametrize(
    "damage",
    [
        {"pad": 7},
        {"cut": 7},
        {"edit_header": lambda header: header["w"].update(dtype="F8_E4M3FN")},
        {"edit_header": lambda header: header["w"].update(shape=[2, 3])},
        {"edit_header": lambda header: header["s"].update(data_offsets=[3, 7])},
    ],
)
def test_the_writer_can_write_what_safetensors_refuses(damage: dict[str, object], tmp_path: Path) -> None:
    tensors = {"w": Stored.of("F8_E4M3", np.ones((2, 2))), "s": Stored.of("F32", 1.0)}
    write_file(tmp_path / "good", tensors, {"format": "pt"})
    assert load_file(tmp_path / "good").keys() == tensors.keys()
    write_file(tmp_path / "bad", tensors, {"format": "pt"}, **damage)  # type: ignore[arg-type]
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "bad")
