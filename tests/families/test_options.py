"""--map, --unscaled, --split and --activation-scales, from Python and from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import deepinfer_prep.convert
from deepinfer_prep import Options, RefusedError, convert_checkpoint, inspect_checkpoint, verify_checkpoint
from deepinfer_prep.cli.main import main
from deepinfer_prep.families.patterns import compile_pattern, fill_pattern
from deepinfer_prep.families.user_map import parse_map
from deepinfer_prep.manifest import read_manifest
from tests.families.conftest import Outcomes
from tests.families.layouts import write_layout
from tests.families.outcomes import convert_layout
from tests.families.raw import read_file, read_files
from tests.small_files import ONE_F32, SCALE, WEIGHT, Tensor, write_config, write_file

UNKNOWN: dict[str, Tensor] = {
    "a.weight": WEIGHT,
    "a.weight_qscale": ("F32", (), ONE_F32),
    "b.weight": WEIGHT,
    "b.weight_qscale": ("F32", (64, 1), ONE_F32 * 64),
    "c.weight": WEIGHT,
    "c.scale": SCALE,
}
MAP = "*.weight=*.weight_qscale"


def source_of(folder: Path, tensors: dict[str, Tensor]) -> Path:
    write_file(folder / "source" / "model.safetensors", tensors)
    return folder / "source"


def refused(source: Path, output: Path, **options: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        convert_checkpoint(source, output, options=Options(**options))
    assert not output.exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "name", "groups"),
    [
        ("*.weight", "a.b.weight", ("a.b",)),
        ("*hc_head_fn", "hc_head_fn", ("",)),
        ("*.t.*.weight", "m.t.x.t.3.weight", ("m.t.x", "3")),
        ("exact.name", "exact.name", ()),
        ("*", "line\nbreak", ("line\nbreak",)),
        ("a[0].w", "a[0].w", ()),
        ("a.*", "aXb", None),
        ("*.weight", "a.weights", None),
    ],
)
def test_patterns_match_whole_names(pattern: str, name: str, groups: tuple[str, ...] | None) -> None:
    match = compile_pattern(pattern).fullmatch(name)
    assert (match.groups() if match else None) == groups


def test_stars_are_carried_over_in_order() -> None:
    assert fill_pattern("*.t.scale", ("m", "3")) == "m.t.scale"
    assert fill_pattern("x.*.y.*", ("1", "2")) == "x.1.y.2"
    assert fill_pattern("one.scale", ("m",)) == "one.scale"


@pytest.mark.parametrize("text", ["", "a", "=a", "a=", "a=b=c", "a=*", "*=*.*"])
def test_maps_of_another_form_are_wrong_usage(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"WEIGHT=SCALE|in SCALE"):
        parse_map(text)
    with pytest.raises(ValueError, match=r"WEIGHT=SCALE|in SCALE"):
        Options(maps=(text,))
    result = CliRunner().invoke(main, ["inspect", str(tmp_path), "--map", text])
    assert result.exit_code == 2


@pytest.mark.parametrize("option", [{"unscaled": "copy"}, {"activation_scales": "half"}, {"implausible_scales": "no"}])
def test_other_choices_are_wrong_usage(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="allowed are"):
        Options(**option)


def test_a_map_pairs_what_no_family_knows(tmp_path: Path) -> None:
    source, output = source_of(tmp_path, UNKNOWN), tmp_path / "output"
    assert "F8_E4M3 tensors that have no scale (2)" in refused(source, output)
    result = convert_checkpoint(source, output, options=Options(maps=(MAP,)))
    assert result.family == "map + deepseek-v4"
    tensors = read_file(output / "model.safetensors")
    assert {tensors[f"{module}.weight"].data for module in "abc"} == {b"\x76" * 4096}
    assert np.all(tensors["b.weight_qscale"].values == 2)
    records = read_manifest(output).weights
    assert [records[f"{module}.weight"].block for module in "abc"] == [(64, 64), (1, 64), (32, 32)]
    assert [records[f"{module}.weight"].reason for module in "abc"] == ["", "", ""]
    assert verify_checkpoint(output, source=source).ok
    assert read_manifest(output).options["maps"] == [MAP]


def test_a_mapped_scale_that_many_weights_share_is_doubled_once(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {f"t.part_{i}.w": WEIGHT for i in range(3)} | {"t.factor": ("BF16", (1,), b"\x80\x3f")}
    source, output = source_of(tmp_path, tensors), tmp_path / "output"
    convert_checkpoint(source, output, options=Options(maps=("*.part_*.w=*.factor",)))
    found = read_file(output / "model.safetensors")
    assert found["t.factor"].values.tolist() == [2.0]
    assert {found[f"t.part_{i}.w"].data for i in range(3)} == {b"\x76" * 4096}
    assert verify_checkpoint(output, source=source).ok


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("*.weights=*.s", "matches no F8_E4M3 tensor"),
        ("a.weight_qscale=c.scale", "matches no F8_E4M3 tensor"),
        (
            "*.weight=*.nothing",
            "matches 3 F8_E4M3 tensors, but none of the scales is there: 'a.nothing' for 'a.weight'",
        ),
        ("a.weight=a.weight", "'a.weight' cannot be its own scale"),
        ("a.weight=b.weight", "have a scale `weight` of dtype F8_E4M3"),
        ("a.weight=ints", "have a scale `ints` of dtype I32"),
        ("a.weight=bytes", "have a scale `bytes` of dtype U8, and the config does not say"),
    ],
)
def test_a_map_that_pairs_nothing_or_no_scale_is_refused(tmp_path: Path, text: str, message: str) -> None:
    extra: dict[str, Tensor] = {"ints": ("I32", (1,), 0), "bytes": ("U8", (2, 2), 127)}
    source = source_of(tmp_path, UNKNOWN | extra)
    assert message in refused(source, tmp_path / "output", maps=(MAP, text))


def test_two_maps_that_disagree_are_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"a.weight": WEIGHT, "a.x": ("F32", (), ONE_F32), "a.y": ("F32", (), ONE_F32)})
    message = refused(source, tmp_path / "output", maps=("*.weight=*.x", "*.weight=*.y"))
    assert "have more than one tensor that could be their scale, `x` and `y` (1): 'a.weight'" in message


def test_a_map_decides_where_two_scales_are_possible(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {
        "l.weight": WEIGHT,
        "l.weight_scale": ("F32", (), ONE_F32),
        "l.weight_scale_inv": ("F32", (), ONE_F32),
    }
    source, output = source_of(tmp_path, tensors), tmp_path / "output"
    message = refused(source, output)
    assert (
        "more than one tensor that could be their scale, `weight_scale_inv` and `weight_scale` (1): 'l.weight'"
        in message
    )
    assert "--map WEIGHT=SCALE" in message
    convert_checkpoint(source, output, options=Options(maps=("*.weight=*.weight_scale",)))
    found = read_file(output / "model.safetensors")
    assert (found["l.weight_scale"].values, found["l.weight_scale_inv"].values) == (2, 1)


@pytest.mark.parametrize(("first", "last"), [(0x77, 0xF7), (0x7F, 0xFF), (0, 0x80)])
def test_codes_that_the_hardware_reads_alike_are_copied(tmp_path: Path, first: int, last: int) -> None:
    codes = bytes([first, last]) * 2048
    source, output = source_of(tmp_path, {"x.weight": ("F8_E4M3", (64, 64), codes)}), tmp_path / "output"
    result = convert_checkpoint(source, output, options=Options(unscaled="copy-if-safe"))
    assert read_file(output / "model.safetensors")["x.weight"].data == codes
    assert result.counts.nan == (4096 if first == 0x7F else 0)
    assert (result.counts.rounded, result.counts.above_240) == (0, 0)
    assert verify_checkpoint(output).ok
    assert verify_checkpoint(output, source=source).ok


@pytest.mark.parametrize("code", [*range(0x78, 0x7F), *range(0xF8, 0xFF)])
def test_each_code_that_the_hardware_reads_differently_forbids_the_copy(tmp_path: Path, code: int) -> None:
    codes = np.full(4096, 0x77, np.uint8)
    codes[[3001, 4000]] = code
    tensors: dict[str, Tensor] = {
        "a.weight": ("F8_E4M3", (64, 64), 0x77),
        "x.weight": ("F8_E4M3", (64, 64), codes.tobytes()),
    }
    source, output = source_of(tmp_path, tensors), tmp_path / "output"
    message = refused(source, output, unscaled="copy-if-safe")
    assert f"model.safetensors: tensor 'x.weight': element 3,001 is the fp8 code 0x{code:02x} (" in message
    found = inspect_checkpoint(source, scan=True)
    assert found.scan is not None
    assert list(found.scan.unsafe) == ["x.weight"]


def test_the_first_code_is_named_whatever_the_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = np.zeros(40_000, np.uint8)
    codes[[11_111, 39_999]] = 0x7C
    source = source_of(tmp_path, {"x.weight": ("F8_E4M3", (200, 200), codes.tobytes())})
    monkeypatch.setattr("deepinfer_prep.files.segments.SEGMENT_BYTES", 4096)
    for workers, chunk_size in ((1, 4096), (4, 512)):
        options = Options(unscaled="copy-if-safe")
        with pytest.raises(RefusedError, match="element 11,111 is") as caught:
            convert_checkpoint(source, tmp_path / "o", options=options, workers=workers, chunk_size=chunk_size)
        assert len(caught.value.reasons) == 1
        found = inspect_checkpoint(source, scan=True, workers=workers, chunk_size=chunk_size).scan
        assert found is not None
        assert "element 11,111 is" in found.unsafe["x.weight"]


def test_strict_counts_the_nan_codes_of_unscaled_tensors_as_well(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"x.weight": ("F8_E4M3", (64, 64), 0x7F)})
    message = refused(source, tmp_path / "output", unscaled="copy-if-safe", strict=True)
    assert "'x.weight' (4,096)" in message


def test_verify_checks_the_codes_of_unscaled_tensors(tmp_path: Path) -> None:
    source, output = source_of(tmp_path, {"x.weight": ("F8_E4M3", (64, 64), 0x38)}), tmp_path / "output"
    convert_checkpoint(source, output, options=Options(unscaled="copy-if-safe"))
    path = output / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7e")
    found = verify_checkpoint(output)
    assert any("the code 0x7e lies above 240" in str(difference) for difference in found.first)


@pytest.mark.parametrize(
    ("field", "value", "needs_source", "problem"),
    [
        ("unscaled", [], True, "the fp8 tensors without a scale are not those of the source"),
        ("activation_scales", [], True, "the static activation scales are not those of the source"),
        ("unscaled", ["l.input_scale"], False, "expected dtype F8_E4M3, found F32"),
        ("unscaled", ["gone"], False, "the manifest names this tensor, but no file holds it"),
    ],
)
def test_verify_finds_a_manifest_that_says_something_else(
    tmp_path: Path, field: str, value: list[str], needs_source: bool, problem: str
) -> None:
    tensors: dict[str, Tensor] = {
        "x.weight": ("F8_E4M3", (64, 64), 0x38),
        "l.weight": WEIGHT,
        "l.weight_scale": ("F32", (), ONE_F32),
        "l.input_scale": ("F32", (), ONE_F32),
    }
    source, output = source_of(tmp_path, tensors), tmp_path / "output"
    convert_checkpoint(source, output, options=Options(unscaled="copy-if-safe"))
    path = output / "neuron_manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    found = verify_checkpoint(output, source=source if needs_source else None)
    assert any(problem in str(difference) for difference in found.first)


def test_unscaled_projections_of_a_repack_stay_refused_but_harmless_ones_pass(tmp_path: Path) -> None:
    bad = convert_layout("deepseek_v4_fp8_experts", tmp_path / "bad", Options(unscaled="copy-if-safe"))
    assert "tensor 'mtp.0.e_proj.weight': element" in bad.refusal
    good = convert_layout("diffusion_cast", tmp_path / "good", Options(unscaled="copy-if-safe"))
    assert good.output_tensors == good.source_tensors
    assert set(good.manifest.unscaled) == set(good.layout.unscaled)


@pytest.mark.parametrize("name", ["deepseek_v4", "deepseek_v4_transformers", "deepseek_v41"])
def test_split_adds_matrices(name: str, tmp_path: Path) -> None:
    layout = write_layout(name, tmp_path / "source")
    output = tmp_path / "output"
    patterns = () if name == "deepseek_v41" else ("*hc_fn", "*_hc.fn") if "transformers" in name else ("*hc_head_fn",)
    result = convert_checkpoint(layout.folder, output, options=Options(split=patterns))
    assert set(read_manifest(output).split) == set(layout.mixing)
    assert not any("were not split" in warning for warning in result.warnings)
    source, sidecar = layout.read(), read_files(output, read_manifest(output).sidecar)
    for matrix in layout.mixing:
        hi, lo = sidecar[matrix + ".hi"].values, sidecar[matrix + ".lo"].values
        assert np.all(np.abs(source[matrix].values - hi - lo) <= 2.0**-17 * np.abs(source[matrix].values))
    assert verify_checkpoint(output, source=layout.folder).ok


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*hc_tail_fn", "--split *hc_tail_fn matches no tensor"),
        ("hc_head_f", "--split hc_head_f matches no tensor"),
        ("*base", "which is F32 [24]: only F32 matrices of two dimensions"),
        ("*gate.weight", "which is BF16 [4, 64]: only F32"),
        ("*", "only F32 matrices of two dimensions"),
    ],
)
def test_a_split_pattern_that_fits_nothing_or_no_f32_matrix_is_refused(
    tmp_path: Path, pattern: str, message: str
) -> None:
    tensors: dict[str, Tensor] = {
        "hc_head_fn": ("F32", (4, 64), 1),
        "hc_head_base": ("F32", (24,), 1),
        "gate.weight": ("BF16", (4, 64), 1),
    }
    assert message in refused(source_of(tmp_path, tensors), tmp_path / "output", split=(pattern,))


def test_a_scale_is_not_split(tmp_path: Path) -> None:
    grid: Tensor = ("F32", (1, 1), ONE_F32)
    source = source_of(tmp_path, {"l.weight": WEIGHT, "l.weight_scale_inv": grid, "l.input_scale": grid})
    for pattern, name in (("*scale_inv", "l.weight_scale_inv"), ("*input_scale", "l.input_scale")):
        message = refused(source, tmp_path / "output", split=(pattern,))
        assert f"--split would split scales (1): {name!r}" in message


def test_a_split_matrix_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    values = np.ones(256, np.float32)
    values[77] = np.inf
    source = source_of(tmp_path, {"hc_head_fn": ("F32", (4, 64), values.tobytes())})
    message = refused(source, tmp_path / "output", split=("*hc_head_fn",))
    assert "tensor 'hc_head_fn': element 77 is inf" in message


STATIC_LAYOUTS = [
    "llama_tensor_static",
    "mistral_hf",
    "mistral_hf_experts",
    "glm_45",
    "modelopt_fp8",
    "mistral_native",
    "mistral_native_cache",
    "autofp8_old",
    "autofp8_cache",
    "quark",
    "diffusion_scaled",
    "diffusion_comfy_quant",
    "fused_experts",
]


@pytest.mark.parametrize("name", STATIC_LAYOUTS)
def test_static_scales_are_doubled_unless_asked(name: str, tmp_path: Path, outcomes: Outcomes) -> None:
    """And nothing else differs from the output that keeps them."""
    doubled, keeping = outcomes[name], convert_layout(name, tmp_path, Options(activation_scales="keep"))
    static, kept = set(doubled.layout.activation_scales), keeping.output_tensors
    assert static
    for tensor, after in doubled.output_tensors.items():
        if tensor in static:
            np.testing.assert_array_equal(after.values, 2 * kept[tensor].values, tensor)
        else:
            assert after == kept[tensor], tensor
    assert doubled.manifest.options["activation_scales"] == "double"
    assert any(f"{len(static):,} static" in text and "are doubled" in text for text in doubled.plan.warnings)
    assert any(f"{len(static):,} static" in text and "are kept" in text for text in keeping.plan.warnings)
    assert verify_checkpoint(keeping.output, source=keeping.layout.folder).ok


def test_a_mapped_scale_is_no_activation_scale_whatever_its_name(tmp_path: Path) -> None:
    source = source_of(tmp_path, {"l.weight": WEIGHT, "l.k_scale": ("F32", (), ONE_F32)})
    found = inspect_checkpoint(source, options=Options(maps=("l.weight=l.k_scale",)))
    assert (found.activation_scales, found.refusals) == ((), ())


def test_upper_bounds_are_no_scales(tmp_path: Path) -> None:
    outcome = convert_layout("fbgemm", tmp_path, Options(activation_scales="double"))
    bounds = [name for name in outcome.source_tensors if name.endswith("input_scale_ub")]
    assert bounds
    assert all(outcome.output_tensors[name] == outcome.source_tensors[name] for name in bounds)


def test_scales_of_integer_activations_and_caches_are_left_out(tmp_path: Path) -> None:
    """An integer cache's and an int8 layer's static scales have nothing to do with a type that ends at 240."""
    tensors: dict[str, Tensor] = {
        "l.weight": WEIGHT,
        "l.weight_scale": ("F32", (), ONE_F32),
        "l.input_scale": ("F32", (), ONE_F32),
        "i.weight": ("I8", (64, 64), 1),
        "i.weight_scale": ("F32", (), ONE_F32),
        "i.input_scale": ("F32", (), ONE_F32),
        "attn.k_scale": ("F32", (), ONE_F32),
    }
    source, output = source_of(tmp_path, tensors), tmp_path / "output"
    group = {"weights": {"type": "float", "num_bits": 8, "strategy": "tensor"}, "targets": ["Linear"]}
    cache = {"type": "int", "num_bits": 8}
    write_config(source, quant_method="compressed-tensors", config_groups={"g": group}, kv_cache_scheme=cache)
    convert_checkpoint(source, output, options=Options(activation_scales="double"))
    assert read_manifest(output).activation_scales == ("l.input_scale",)
    found = read_file(output / "model.safetensors")
    assert [found[name].values for name in ("l.input_scale", "i.input_scale", "attn.k_scale")] == [2, 1, 1]


def test_an_activation_scale_without_a_double_is_refused(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {
        "l.weight": WEIGHT,
        "l.weight_scale": ("F32", (), ONE_F32),
        "l.input_scale": ("F16", (), np.float16(40_000).tobytes()),
    }
    source = source_of(tmp_path, tensors)
    assert "tensor 'l.input_scale': element 0 is 40000.0" in refused(source, tmp_path / "o", activation_scales="double")
    convert_checkpoint(source, tmp_path / "o", options=Options(activation_scales="keep"))


ALL = {
    "strict": True,
    "maps": (MAP,),
    "blocks": ("a.weight=64x64", "c.*=32x32"),
    "unscaled": "copy-if-safe",
    "split": ("*.fn",),
    "activation_scales": "keep",
    "implausible_scales": "accept",
}


def test_options_survive_json() -> None:
    options = Options(**ALL)  # type: ignore[arg-type]
    assert Options.from_json(json.loads(json.dumps(options.to_json()))) == options
    assert json.loads(json.dumps(options.to_json())) == options.to_json()
    assert Options.from_json({}) == Options()
    with pytest.raises(TypeError):
        Options.from_json({"unheard": 1})


EVERYTHING: dict[str, Tensor] = UNKNOWN | {
    "d.weight": ("F8_E4M3", (64, 64), 0x31),
    "a.input_scale": ("F32", (), ONE_F32),
    "mix.fn": ("F32", (4, 64), 1),
}


def test_all_options_together_from_the_command_line(tmp_path: Path) -> None:
    source, output = source_of(tmp_path, EVERYTHING), tmp_path / "output"
    options = ["--map", MAP, "--unscaled", "copy-if-safe", "--split", "*.fn", "--activation-scales", "keep"]
    options += ["--block", "a.weight=64x64", "--block", "c.*=32x32", "--implausible-scales", "accept"]
    runner = CliRunner()
    inspected = runner.invoke(main, ["inspect", str(source), "--json", "--quiet", "--scan", *options])
    assert inspected.exit_code == 0
    found = json.loads(inspected.stdout)
    assert (found["unscaled"], found["split"], found["activation_scales"]) == (
        ["d.weight"],
        ["mix.fn"],
        ["a.input_scale"],
    )
    assert found["refusals"] == []
    planned = runner.invoke(main, ["convert", str(source), str(output), "--dry-run", "--quiet", *options])
    assert planned.exit_code == 0
    assert not output.exists()
    done = runner.invoke(main, ["convert", str(source), str(output), "--strict", "--quiet", *options])
    assert done.exit_code == 0
    assert Options.from_json(read_manifest(output).options) == Options(**ALL)  # type: ignore[arg-type]
    checked = runner.invoke(main, ["verify", str(output), "--source", str(source), "--quiet"])
    assert checked.exit_code == 0, checked.stdout


def test_an_interrupted_run_with_options_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal's identity holds the options as JSON gives them back."""
    source, output = source_of(tmp_path, EVERYTHING), tmp_path / "output"
    options = Options(**ALL)  # type: ignore[arg-type]

    def stop(*arguments: object) -> object:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(deepinfer_prep.convert.sidecar, "choose_contents", stop)
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(source, output, options=options)
    with pytest.raises(RefusedError, match="options differ"):
        convert_checkpoint(source, output, options=Options(maps=(MAP,), unscaled="copy-if-safe"))
    assert convert_checkpoint(source, output, options=options).resumed_bytes > 0
    assert verify_checkpoint(output, source=source).ok


def test_a_tensor_of_a_sidecar_name_is_refused(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {"a.hc_attn_fn": ("F32", (4, 64), 1), "a.hc_attn_fn.hi": ("BF16", (4, 64), 1)}
    assert "names that the output needs for its own: 'a.hc_attn_fn.hi'" in refused(
        source_of(tmp_path, tensors), tmp_path / "output"
    )
