"""The sample generator against ml_dtypes, safetensors, torch and the released checkpoint's own figures."""

from __future__ import annotations

import json
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import make_checkpoint
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from click.testing import CliRunner
from make_checkpoint import (
    TINY,
    ModelDims,
    Plain,
    Quantized,
    SampleCheckpoint,
    SampleOptions,
    choose_dims,
    source_values,
    write_checkpoint,
)
from safetensors import safe_open
from safetensors.torch import load_file, save
from sample_checkpoint import extras
from sample_checkpoint.fit import RELEASED_BYTES, DimsError
from sample_checkpoint.quantize import (
    E2M1_VALUES,
    block_amax,
    e4m3_values,
    encode_bf16,
    encode_e2m1,
    encode_e4m3,
    power_of_two_scale,
    quantize,
)
from sample_checkpoint.table import entries, total_bytes
from sample_checkpoint.values import block_values, row_blocks
from sample_checkpoint.writer import write_shards


def every_rounding_case() -> npt.NDArray[np.float32]:
    """Every upper half of a float32 with lower halves at, beside and between the ties: all that a rounding can see."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    return np.concatenate([upper | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(np.float32)


def test_e4m3_values_are_those_of_ml_dtypes() -> None:
    decoded = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(e4m3_values(), decoded)


def test_e4m3_rounds_every_case_as_ml_dtypes_does() -> None:
    values = every_rounding_case()
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    numbers = ~np.isnan(values)
    codes = encode_e4m3(values)
    np.testing.assert_array_equal(codes[numbers], expected[numbers])
    assert set(codes[~numbers] & 0x7F) == {0x7F}


def test_e2m1_rounds_every_case_as_ml_dtypes_does() -> None:
    assert np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(float).tolist() == list(E2M1_VALUES)
    values = every_rounding_case()
    values = values[np.isfinite(values)].reshape(2, -1)
    packed = encode_e2m1(values)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(values.shape)
    np.testing.assert_array_equal(codes, values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8))


def test_bf16_rounds_every_case_as_ml_dtypes_does() -> None:
    values = every_rounding_case()
    values = values[np.isfinite(values)]
    np.testing.assert_array_equal(encode_bf16(values), values.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.parametrize("largest", [448.0, 6.0])
def test_the_scale_is_the_smallest_power_of_two_that_holds_the_block(largest: float) -> None:
    exact = largest * np.exp2(np.arange(-12, 20, dtype=np.float32))
    amax = np.concatenate([exact, np.nextafter(exact, np.float32(np.inf)), exact * np.float32(0.9)])
    scale, reciprocal = power_of_two_scale(amax.astype(np.float32), largest)
    value = np.exp2(scale.astype(np.float64) - 127)
    assert np.all(amax <= largest * value)
    assert np.all(amax > largest * value / 2)
    np.testing.assert_array_equal(reciprocal * value, 1)


def test_a_zero_block_gets_a_scale_and_zero_codes() -> None:
    codes, scale = quantize(np.zeros((32, 32), np.float32), 32, "e4m3")
    assert not codes.any()
    assert 0 < scale[0, 0] < 127


@pytest.mark.parametrize(("shape", "block_rows"), [((70, 100), 32), ((3, 33), 1), ((64, 64), 32)])
def test_edge_blocks_take_the_largest_of_what_they_cover(shape: tuple[int, int], block_rows: int) -> None:
    values = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
    expected = [
        [np.abs(values[top : top + block_rows, left : left + 32]).max() for left in range(0, shape[1], 32)]
        for top in range(0, shape[0], block_rows)
    ]
    np.testing.assert_array_equal(block_amax(values, block_rows), expected)
    codes, scale = quantize(values.copy(), block_rows, "e4m3")
    step = np.repeat(np.repeat(np.exp2(scale - 127.0), block_rows, 0)[: shape[0]], 32, 1)[:, : shape[1]]
    decoded = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * step
    np.testing.assert_allclose(decoded, values, rtol=2**-4, atol=2**-10 * step.max())


def test_released_dimensions_give_the_released_checkpoint() -> None:
    """Counts and bytes that the published index and headers of DeepSeek-V4.1-Flash state."""
    released = list(entries(ModelDims()))
    tensors = [tensor for entry in released for tensor in entry.tensors]
    assert (len(tensors), total_bytes(ModelDims())) == (96_085, RELEASED_BYTES)
    dtypes = Counter(tensor.dtype for tensor in tensors)
    assert (dtypes["F8_E4M3"], dtypes["I8"], dtypes["F8_E8M0"]) == (357, 47_232, 47_589)
    assert sum(t.nbytes for t in tensors if t.dtype == "F8_E4M3") == 204_015_223_296
    assert sum(t.name.startswith("mtp.") for t in tensors) == 2_401
    assert sum(t.name.endswith("_fn") for t in tensors) == 86
    shapes = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    assert shapes["layers.0.attn.wq_b.scale"] == ("F8_E8M0", (1024, 40))
    assert shapes["layers.0.ffn.experts.383.w2.weight"] == ("I8", (5120, 1152))
    assert shapes["layers.14.engram.embed.scale"] == ("F8_E8M0", (384016682, 8))
    assert shapes["mtp.0.main_proj.weight"] == ("F8_E4M3", (5120, 15360))


def test_a_huge_size_gives_the_released_dimensions() -> None:
    dims = choose_dims(SampleOptions(size=RELEASED_BYTES))
    rows = sum(dims.engram_rows) - sum(ModelDims().engram_rows)
    assert replace(dims, engram_rows=ModelDims().engram_rows) == ModelDims()
    assert -32 <= rows <= 0


@pytest.mark.parametrize("size", [1_700_000, 32_000_000, 1_000_000_000, 8_000_000_000, 60_000_000_000])
def test_a_size_is_met_with_the_released_proportions(size: int) -> None:
    dims = choose_dims(SampleOptions(size=size))
    total = total_bytes(dims)
    assert size - 32 * 264 <= total <= size
    if size > 10_000_000:
        assert sum(dims.engram_rows) * 264 / total == pytest.approx(0.4, abs=0.01)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> SampleCheckpoint:
    return write_checkpoint(tmp_path_factory.mktemp("sample") / "tiny", TINY)


@pytest.fixture(scope="module")
def stored(sample: SampleCheckpoint) -> dict[str, torch.Tensor]:
    return {name: t for shard in sample.shards for name, t in load_file(sample.folder / shard.filename).items()}


def header_of(path: Path) -> tuple[int, dict[str, Any]]:
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return 8 + length, json.loads(file.read(length))


def test_every_kind_of_released_tensor_is_present(sample: SampleCheckpoint) -> None:
    """Same names once numbers are struck out, same dtypes and numbers of dimensions."""

    def kinds(dims: ModelDims) -> dict[tuple[str, ...], tuple[str, int]]:
        tensors = [tensor for entry in entries(dims) for tensor in entry.tensors]
        return {
            tuple("N" if part.isdigit() else part for part in t.name.split(".")): (t.dtype, len(t.shape))
            for t in tensors
        }

    assert kinds(sample.dims) == kinds(ModelDims())


def test_headers_hold_the_planned_tensors(sample: SampleCheckpoint) -> None:
    planned = {t.name: (t.dtype, list(t.shape)) for entry in sample.entries for t in entry.tensors}
    found: dict[str, tuple[str, list[int]]] = {}
    for shard in sample.shards:
        data, header = header_of(sample.folder / shard.filename)
        assert data % 8 == 0
        assert header.pop("__metadata__") == {"format": "pt"}
        ranges = sorted(value["data_offsets"] for value in header.values())
        assert [start for start, _ in ranges] == [0] + [end for _, end in ranges[:-1]]
        assert data + ranges[-1][1] == (sample.folder / shard.filename).stat().st_size
        found |= {name: (value["dtype"], value["shape"]) for name, value in header.items()}
    assert found == planned


def test_files_are_what_safetensors_itself_would_write(sample: SampleCheckpoint) -> None:
    for shard in sample.shards:
        path = sample.folder / shard.filename
        assert path.read_bytes() == save(load_file(path), {"format": "pt"})


def test_index_agrees_with_headers(sample: SampleCheckpoint) -> None:
    index = json.loads((sample.folder / "model.safetensors.index.json").read_text())
    names: dict[str, str] = {}
    for shard in sample.shards:
        with safe_open(sample.folder / shard.filename, "pt") as file:
            names |= dict.fromkeys(file.keys(), shard.filename)
    assert index["weight_map"] == names == sample.shard_of
    tensors = sum(header_size(sample.folder / shard.filename) for shard in sample.shards)
    assert index["metadata"] == {"total_size": tensors}


def header_size(path: Path) -> int:
    """Bytes of tensor data in a file."""
    return path.stat().st_size - header_of(path)[0]


def test_some_scales_lie_in_another_shard(sample: SampleCheckpoint) -> None:
    quantized = [entry for entry in sample.entries if isinstance(entry, Quantized)]
    apart = [e.name for e in quantized if sample.shard_of[e.weight.name] != sample.shard_of[e.scale.name]]
    assert apart
    last = [sample.shard_of[f"layers.{layer}.engram.embed.weight"] for layer in sample.dims.engram_layers]
    assert last == [shard.filename for shard in sample.shards[-2:]]


def test_stored_weights_dequantize_to_the_source(sample: SampleCheckpoint, stored: dict[str, torch.Tensor]) -> None:
    """Half a step of e4m3 (2^-4 of the value, or 2^-10 of the scale below the normals) and of e2m1 (1/4, or 1/4)."""
    for entry in sample.entries:
        if not isinstance(entry, Quantized):
            continue
        source = torch.from_numpy(source_values(entry, sample.seed))
        scale = stored[entry.scale.name].float().repeat_interleave(entry.block_rows, 0).repeat_interleave(32, 1)
        scale = scale[: source.shape[0], : source.shape[1]]
        weight = stored[entry.weight.name]
        if entry.element == "e4m3":
            value, relative, absolute = weight.float(), 2.0**-4, 2.0**-10
        else:
            code = torch.stack([weight & 15, (weight.view(torch.uint8) >> 4).view(torch.int8)], -1).flatten(1).long()
            value, relative, absolute = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])[code], 0.25, 0.25
        bound = torch.maximum(relative * source.abs(), absolute * scale)
        assert torch.all((value * scale - source).abs() <= bound), entry.name


def test_stored_plain_tensors_are_the_rounded_source(sample: SampleCheckpoint, stored: dict[str, torch.Tensor]) -> None:
    for entry in sample.entries:
        if isinstance(entry, Plain):
            tensor = stored[entry.name]
            source = torch.from_numpy(source_values(entry, sample.seed)).reshape(entry.stored.shape)
            assert torch.equal(tensor, source.to(tensor.dtype)), entry.name


def test_codes_above_240_occur_and_none_is_nan(sample: SampleCheckpoint, stored: dict[str, torch.Tensor]) -> None:
    for entry in sample.entries:
        if isinstance(entry, Quantized) and entry.element == "e4m3":
            magnitudes = stored[entry.name].view(torch.uint8).numpy() & 0x7F
            assert magnitudes.max() in range(0x78, 0x7F), entry.name
    every = np.concatenate(
        [
            stored[e.name].view(torch.uint8).numpy().ravel()
            for e in sample.entries
            if isinstance(e, Quantized) and e.element == "e4m3"
        ]
    )
    assert set(np.unique(every)) == set(range(256)) - {0x7F, 0xFF}


def test_config_is_built_as_released(sample: SampleCheckpoint) -> None:
    config = json.loads((sample.folder / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV41ForCausalLM"]
    assert config["quantization_config"] == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
    }
    text = config["text_config"]
    assert (config["model_type"], text["model_type"]) == ("deepseek_v41", "deepseek_v41_text")
    assert text["engram_num_embeddings"] == list(sample.dims.engram_rows)
    assert len(text["compress_ratios"]) == sample.dims.layers + sample.dims.draft_stages
    assert "vision_config" in config
    assert text["qk_rope_head_dim"] < text["head_dim"]
    assert len(text["compress_ratios"]) == text["num_hidden_layers"] + text["num_nextn_predict_layers"]
    assert 1 in text["compress_ratios"]
    others = {str(path.relative_to(sample.folder)) for path in sample.folder.rglob("*") if path.is_file()}
    assert {"tokenizer.json", "README.md", "inference/config.json", "encoding/encoding.py"} < others


def test_config_has_every_field_that_serving_code_reads(sample: SampleCheckpoint) -> None:
    text = json.loads((sample.folder / "config.json").read_text())["text_config"]
    # As serving code demands them: bias-free attention without dropout, untied embeddings, YaRN of the release.
    assert (text["attention_bias"], text["attention_dropout"], text["tie_word_embeddings"]) == (False, 0.0, False)
    assert text["rope_scaling"].items() >= {"factor": 16, "original_max_position_embeddings": 65536}.items()
    assert text["rope_scaling"].keys() >= {"beta_fast", "beta_slow"}
    for name in ("candidate_block_size", "candidate_topk_blocks", "dspark_noise_token_id", "engram_vocab_size"):
        assert isinstance(text[name], int), name
    assert 0 <= text["dspark_noise_token_id"] < text["vocab_size"]


def test_rope_covers_64_dimensions_as_in_the_release() -> None:
    assert extras.config(ModelDims())["text_config"]["qk_rope_head_dim"] == 64


def test_the_same_options_give_the_same_bytes_and_another_seed_others(sample: SampleCheckpoint, tmp_path: Path) -> None:
    again = write_checkpoint(tmp_path / "again", TINY)
    other = write_checkpoint(tmp_path / "other", replace(TINY, seed=1))
    for shard in sample.shards:
        content = (sample.folder / shard.filename).read_bytes()
        assert content == (again.folder / shard.filename).read_bytes()
        assert content != (other.folder / shard.filename).read_bytes()


@pytest.mark.parametrize("workers", [1, 3])
def test_bytes_do_not_depend_on_the_number_of_workers(workers: int, sample: SampleCheckpoint, tmp_path: Path) -> None:
    write_shards(tmp_path, sample.shards, sample.entries, sample.seed, workers)
    for shard in sample.shards:
        assert (tmp_path / shard.filename).read_bytes() == (sample.folder / shard.filename).read_bytes()


def test_values_do_not_depend_on_how_they_are_read() -> None:
    entry = next(entry for entry in entries(choose_dims(SampleOptions())) if len(list(row_blocks(entry))) > 2)
    start, stop = list(row_blocks(entry))[1]
    np.testing.assert_array_equal(source_values(entry, 5)[start:stop], block_values(entry, 5, start, stop))


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_any_number_of_shards_holds_every_tensor_once(shards: int, tmp_path: Path) -> None:
    sample = write_checkpoint(tmp_path, replace(TINY, shards=shards))
    held = [name for shard in sample.shards for name in load_file(tmp_path / shard.filename)]
    assert sorted(held) == sorted(t.name for entry in sample.entries for t in entry.tensors)
    assert len(list(tmp_path.glob("*.safetensors"))) == shards


def test_a_foreign_folder_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious.safetensors").write_text("weights")
    with pytest.raises(FileExistsError, match="no earlier sample"):
        write_checkpoint(tmp_path, replace(TINY, overwrite=True))
    assert [path.name for path in tmp_path.iterdir()] == ["precious.safetensors"]


def test_overwriting_leaves_no_old_shard(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(TINY, shards=6))
    with pytest.raises(FileExistsError, match="--overwrite"):
        write_checkpoint(tmp_path, TINY)
    write_checkpoint(tmp_path, replace(TINY, overwrite=True))
    assert len(list(tmp_path.glob("*.safetensors"))) == 4


@pytest.mark.parametrize(
    "options",
    [SampleOptions(size=1000), SampleOptions(hidden=100), SampleOptions(layers=3), SampleOptions(experts=0)],
)
def test_impossible_dimensions_are_refused(options: SampleOptions, tmp_path: Path) -> None:
    with pytest.raises(DimsError):
        write_checkpoint(tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "size"), [("8GB", 8 * 10**9), ("16MiB", 1 << 24), ("1.5 kB", 1500), ("77", 77), ("2GiB", 1 << 31)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert make_checkpoint.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "8XB", "-1GB", "1e3"])
def test_nonsense_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="no size"):
        make_checkpoint.parse_size(text)


def test_command_line(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(make_checkpoint.main, [str(out), "--hidden", "64", "--experts", "4", "--seed", "3"])
    assert result.exit_code == 0, result.output
    assert "hidden 64, 4 layers, 4 experts" in result.output
    again = CliRunner().invoke(make_checkpoint.main, [str(out)])
    assert again.exit_code == 1
    assert "--overwrite" in again.output
