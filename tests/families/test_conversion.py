"""Every family's checkpoint, converted: what changes, what does not, and that the numbers stay the same."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from deepinfer_prep import verify_checkpoint
from deepinfer_prep.families import FAMILIES, fp8_as_bytes
from deepinfer_prep.families.quantization_config import Quantization
from tests.families.conftest import Outcomes
from tests.families.layouts import LAYOUTS
from tests.families.outcomes import REFUSED, Outcome
from tests.families.raw import Stored, read_metadata
from tests.families.rules import Blocks, Grid, GroupedBlocks, Rows, SpreadBlocks

RECOGNISED = {
    "tensorrt_llm": "tensorrt-llm",
    "quark_blocks": "quark",
    "autoround_mxfp8": "weight-scale",
    "modelopt_experts": "modelopt",
    "deepseek_v41": "deepseek-v4",
    "deepseek_v4": "deepseek-v4",
    "deepseek_v4_fp8_experts": "deepseek-v4",
    "deepseek_v4_transformers": "fine-grained-fp8",
    "deepseek_v4_transformers_fp4": "fine-grained-fp8",
    "deepseek_inference": "deepseek-inference",
    "qwen38_ngram": "fine-grained-fp8 + shared-table",
    "qwen38_ngram_scalar": "shared-table",
    "qwen38_ngram_rows": "weight-scale",
    "llama_channel": "compressed-tensors",
    "llama_tensor_static": "compressed-tensors",
    "llama_block": "compressed-tensors",
    "llama_mxfp8": "compressed-tensors",
    "llama_nvfp4": "nvfp4",
    "compressed_groups": "compressed-tensors",
    "glm_45": "compressed-tensors",
    "kimi_k2_thinking": "compressed-tensors",
    "kimi_k3": "compressed-tensors",
    "modelopt_fp8": "modelopt",
    "modelopt_fp8_channel": "modelopt",
    "modelopt_fp8_block": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "modelopt_nvfp4": "nvfp4",
    "modelopt_mixed": "modelopt + nvfp4",
    "gpt_oss": "mxfp4",
    "mistral_native": "mistral",
    "mistral_native_cache": "mistral",
    "fbgemm": "fbgemm",
    "autofp8": "weight-scale",
    "autofp8_old": "weight-scale",
    "autofp8_cache": "weight-scale",
    "tensor_powers": "weight-scale",
    "quark": "quark",
    "quark_layers": "quark",
    "torchao": "torchao",
    "torchao_mx": "torchao",
    "diffusion_scaled": "comfyui",
    "diffusion_comfy_quant": "comfyui",
    "diffusion_cast": "unknown",
    "diffusion_cast_large": "unknown",
    "diffusion_e5m2": "e5m2",
    "transformer_engine": "transformer-engine",
    "mixed_names": "mistral + deepseek-v4 + fine-grained-fp8 + weight-scale",
}
"""All others are of transformers' fine-grained fp8."""

E4M3FN = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
HALVED = (E4M3FN.astype(np.float32) / 2).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
ROUNDED = [*range(0x01, 0x10, 2), *range(0x81, 0x90, 2)]


def test_each_family_is_recognised(outcome: Outcome) -> None:
    assert outcome.plan.family == RECOGNISED.get(outcome.layout.name, "fine-grained-fp8")


def test_every_refusal_is_expected(outcome: Outcome) -> None:
    assert bool(outcome.refusal) == (outcome.layout.name in REFUSED)
    assert REFUSED.get(outcome.layout.name, "") in outcome.refusal
    if outcome.refusal:
        assert not outcome.output.exists()
        assert "--unscaled copy-if-safe" in outcome.refusal, "the way on is named"


def test_weights_are_halved_scales_doubled_and_nothing_else_changes(converted: Outcome) -> None:
    source, output = converted.source_tensors, converted.output_tensors
    weights, scales = {weight.name for weight in converted.layout.weights}, set(converted.layout.scales)
    assert output.keys() == source.keys()
    for name, before in source.items():
        after = output[name]
        assert (after.dtype, after.shape) == (before.dtype, before.shape), name
        if name in weights:
            np.testing.assert_array_equal(after.codes, HALVED[before.codes], name)
        elif name in scales and before.dtype == "U8":
            np.testing.assert_array_equal(after.codes, before.codes + 1, name)
        elif name in scales or name in converted.layout.activation_scales:
            np.testing.assert_array_equal(after.values, 2 * before.values, name)
        else:
            assert after.data == before.data, name


def test_no_halved_weight_holds_a_code_that_the_hardware_reads_differently(converted: Outcome) -> None:
    for weight in converted.layout.weights:
        assert int((converted.output_tensors[weight.name].codes & 0x7F).max()) <= 0x76, weight.name


def test_dequantizing_gives_the_same_numbers_but_for_the_16_codes(converted: Outcome) -> None:
    """By the family's own rule; the 16 codes move by at most 2^-9 of the scale."""
    layout = converted.layout
    before, after = layout.dequantize(), layout.dequantize(converted.output)
    moved = 0
    for weight in layout.weights:
        rounded = np.isin(converted.source_tensors[weight.name].codes, ROUNDED)
        step = weight.rule(np.ones(rounded.shape), converted.source_tensors[weight.scale].values) * 2.0**-9
        difference = np.abs(after[weight.name] - before[weight.name])
        assert not difference[~rounded].any(), weight.name
        np.testing.assert_array_equal(difference[rounded], step[rounded], weight.name)
        moved += int(rounded.sum())
    assert moved or not layout.weights, "the fixtures are meant to hold codes that halving rounds"


def test_header_metadata_is_kept_and_marked(converted: Outcome) -> None:
    for file in converted.layout.files:
        before, after = (read_metadata(folder / file) or {} for folder in (converted.layout.folder, converted.output))
        assert after == {"format": "pt", **before, "deepinfer_prep": after["deepinfer_prep"], "fp8_max": "224"}


def test_other_files_are_copied(converted: Outcome) -> None:
    for path in converted.layout.folder.rglob("*"):
        if path.is_file() and path.name not in converted.layout.files:
            copy = converted.output / path.relative_to(converted.layout.folder)
            assert copy.read_bytes() == path.read_bytes()


def test_the_manifest_names_every_weight_with_its_scale(converted: Outcome) -> None:
    records = converted.manifest.weights
    halved = {name: record.scale for name, record in records.items() if record.element == "e4m3"}
    assert halved == {weight.name: weight.scale for weight in converted.layout.weights}
    packed = {name: record.scale for name, record in records.items() if record.element == "e2m1"}
    assert packed.items() <= dict(converted.layout.packed).items()
    assert not converted.manifest.unscaled


def test_static_scales_are_found_and_reported(outcome: Outcome) -> None:
    packed = {weight.rpartition(".")[0] for weight, _ in outcome.layout.packed}
    expected = [name for name in outcome.layout.activation_scales if name.rpartition(".")[0] not in packed]
    assert sorted(outcome.plan.activation_scales) == sorted(expected), "NVFP4's input scales are of another kind"
    warnings = [warning for warning in outcome.plan.warnings if "static activation" in warning]
    assert len(warnings) == bool(expected)
    assert all(f"{len(expected):,} static" in warning and "are doubled" in warning for warning in warnings)


def expanded_scale(outcome: Outcome, name: str) -> npt.NDArray[np.float64]:
    """For each element of an fp8 weight the doubled scale that covers it, by the family's own rule."""
    weight = next(weight for weight in outcome.layout.weights if weight.name == name)
    shape = outcome.source_tensors[name].shape
    return weight.rule(np.ones(shape), outcome.output_tensors[weight.scale].values)


def kernel_form(expanded: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8] | None:
    """The e8m0 bytes of 32x32 blocks, or None where a block holds several scales or one that is no power of two."""
    corners = [np.arange(0, size, 32) for size in expanded.shape[-2:]]
    extremes: list[npt.NDArray[Any]] = []
    for reduce in (np.minimum, np.maximum):
        rows: Any = reduce.reduceat(expanded, corners[0], axis=-2)
        extremes.append(reduce.reduceat(rows, corners[1], axis=-1))
    mantissa, exponent = np.frexp(extremes[0])
    if not (extremes[0] == extremes[1]).all() or not (mantissa == 0.5).all():
        return None
    return np.asarray(exponent + 126, np.uint8)


def stored_kernel_scale(outcome: Outcome, name: str) -> Stored:
    return {**outcome.output_tensors, **outcome.sidecar}[name]


def test_kernel_scales_exist_where_the_scales_allow_them_and_only_there(converted: Outcome) -> None:
    """Both ways: what is there is right, and where nothing is there the doubled scale has no 32x32 e8m0 form."""
    for name in (weight.name for weight in converted.layout.weights):
        record = converted.manifest.weights[name]
        expected = kernel_form(expanded_scale(converted, name))
        if record.kernel_scale is not None:
            assert expected is not None, name
            stored = stored_kernel_scale(converted, record.kernel_scale)
            assert stored.dtype in ("U8", "F8_E8M0")
            np.testing.assert_array_equal(stored.codes, expected, name)
        else:
            assert record.reason, name
            assert expected is None or "look-up table" in record.reason, (name, record.reason)


def test_fp4_experts_use_their_stored_scale(outcomes: Outcomes) -> None:
    for name in ("deepseek_v41", "deepseek_v4", "deepseek_v4_transformers_fp4", "mixed_names"):
        layout, records = outcomes[name].layout, outcomes[name].manifest.weights
        fp4 = {weight: scale for weight, scale in layout.packed if weight.endswith(".weight")}
        assert fp4
        for weight, scale in fp4.items():
            assert (records[weight].element, records[weight].kernel_scale) == ("e2m1", scale)


def test_outputs_verify_alone_and_against_their_source(converted: Outcome) -> None:
    assert verify_checkpoint(converted.output, workers=1).first == ()
    assert verify_checkpoint(converted.output, source=converted.layout.folder, workers=1).first == ()


def test_a_scale_that_many_weights_share_is_doubled_once(outcomes: Outcomes) -> None:
    for name, count in (("qwen38_ngram", 8), ("qwen38_ngram_scalar", 4)):
        outcome = outcomes[name]
        shared = [weight for weight in outcome.layout.weights if weight.scale.endswith("embedding.weight_scale")]
        assert len(shared) == count
        (scale,) = {weight.scale for weight in shared}
        assert outcome.output_tensors[scale].values == 2 * outcome.source_tensors[scale].values


def test_a_grid_that_follows_no_ceil_rule_is_reported_and_doubled(outcomes: Outcomes) -> None:
    outcome = outcomes["mimo_v25_pro"]
    record = outcome.manifest.weights["model.layers.0.self_attn.qkv_proj.weight"]
    assert record.block is None
    assert record.kernel_scale is None
    assert record.reason == "blocks of 128x128 are stated and give a grid of [14, 2], but the scale has [16, 2]"
    assert any(record.reason in warning for warning in outcome.plan.warnings)


def test_mixing_matrices_are_split_by_v4s_names_and_others_reported(outcomes: Outcomes) -> None:
    for name in LAYOUTS:
        plan, mixing = outcomes[name].plan, outcomes[name].layout.mixing
        left = [matrix for matrix in mixing if not matrix.endswith(("hc_attn_fn", "hc_ffn_fn"))]
        assert set(plan.split) == set(mixing) - set(left)
        reported = [warning for warning in plan.warnings if "were not split" in warning]
        assert all(any(matrix in warning for warning in reported) for matrix in left)


def expected_block(grid: Grid, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """What the manifest has to say of a weight whose fixture was quantized on this grid."""
    rows, columns = shape[-2:]
    match grid:
        case Blocks():
            return grid.rows, grid.columns
        case SpreadBlocks():
            return 128, 128
        case GroupedBlocks() if rows // grid.groups % 128:
            return None
        case GroupedBlocks():
            return 128, 128
        case Rows():
            return 1, columns
    return rows, columns


def test_the_manifest_states_the_block_that_the_weight_was_quantized_with(converted: Outcome) -> None:
    for weight in converted.layout.weights:
        shape = converted.source_tensors[weight.name].shape
        record = converted.manifest.weights[weight.name]
        assert record.block == expected_block(weight.rule.grid, shape), weight.name


def test_every_family_reads_one_of_the_sample_checkpoints(outcomes: Outcomes) -> None:
    checkpoints = [outcomes[name].plan.checkpoint for name in LAYOUTS]
    reads = [(checkpoint, Quantization(checkpoint)) for checkpoint in checkpoints]
    for layout in (layout for layout in FAMILIES if layout is not fp8_as_bytes.layout):
        assert any(layout(*read) is not None for read in reads), layout.__module__


def test_look_up_tables_have_no_kernel_scale_for_that_reason(outcomes: Outcomes) -> None:
    tables = {
        "deepseek_v41": "engram.embed.weight",
        "qwen38_ngram": ".shard_0.weight",
        "qwen38_ngram_scalar": "shards.0.weight",
    }
    for name, suffix in tables.items():
        records = outcomes[name].manifest.weights
        reasons = {records[weight].reason for weight in records if weight.endswith(suffix)}
        assert reasons == {"it is a look-up table, not the operand of a GEMM"}


@pytest.mark.parametrize("name", ["kimi_k2_thinking", "kimi_k3", "gpt_oss", "diffusion_e5m2"])
def test_checkpoints_with_nothing_to_halve_say_so_and_are_copied(name: str, outcomes: Outcomes) -> None:
    outcome = outcomes[name]
    assert outcome.output_tensors == outcome.source_tensors
    assert any("every tensor is copied as it is" in warning for warning in outcome.plan.warnings)
    assert any("copied as they are" in warning for warning in outcome.plan.warnings)
    assert json.loads((outcome.output / "neuron_manifest.json").read_text())["weights"] == {}


def test_manifest_and_headers_agree_for_the_runtime(converted: Outcome) -> None:
    pytest.importorskip("torch")
    from deepinfer_prep.runtime import PreparedCheckpoint

    with PreparedCheckpoint(converted.output, verify="codes") as opened:
        for name in opened.tensors:
            opened.read(name)
