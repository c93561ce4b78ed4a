"""A refusal that has found the probable scales prints the --map that pairs them, and that map works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepinfer_prep import Options, RefusedError, convert_checkpoint
from deepinfer_prep.files.checkpoint import open_checkpoint
from deepinfer_prep.planning.plan import plan_conversion
from tests.small_files import ONE_F32, WEIGHT, Tensor, write_file

F32: Tensor = ("F32", (), ONE_F32)
PAIRS = {
    "a suffix of its own": {"a.0.q.weight": "a.0.q.weight_qscale", "a.1.k.weight": "a.1.k.weight_qscale"},
    "another name in the module": {"a.q.weight": "a.q.wscale", "a.k.weight": "a.k.wscale"},
    "stacked experts": {
        "m.0.experts.gate_up_proj": "m.0.experts.gate_up_proj_wscale",
        "m.0.experts.down_proj": "m.0.experts.down_proj_wscale",
        "m.7.experts.down_proj": "m.7.experts.down_proj_wscale",
    },
    "stacked experts without a suffix": {"m.experts.w1": "m.experts.w1.scales", "m.experts.w2": "m.experts.w2.scales"},
    "one scale of all parts": {
        "t.parts.0.weight": "t.weight_factor_scale",
        "t.parts.1.weight": "t.weight_factor_scale",
    },
    "another prefix": {"model.layers.0.q.weight": "layers.0.q.weight_scaling_factor"},
    "a name without modules": {"weight": "weight_qscale"},
}


@pytest.mark.parametrize("case", PAIRS)
def test_the_printed_map_pairs_all(tmp_path: Path, case: str) -> None:
    tensors: dict[str, Tensor] = dict.fromkeys(PAIRS[case], WEIGHT) | dict.fromkeys(PAIRS[case].values(), F32)
    source = tmp_path / "source"
    write_file(source / "model.safetensors", tensors)
    with pytest.raises(RefusedError) as caught:
        convert_checkpoint(source, tmp_path / "o")
    (reason,) = caught.value.reasons
    assert f"pairs {len(PAIRS[case])} of the {len(PAIRS[case])}." in reason
    (text,) = re.findall("--map '(.*?)'", reason)
    plan = plan_conversion(open_checkpoint(source), Options(maps=(text,)))
    assert {found.quantized.weight: found.quantized.scale for found in plan.weights} == PAIRS[case]
    assert plan.refusals == ()


def test_bytes_are_suggested_as_exponents(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"l.weight": WEIGHT, "l.weight_mxscale": ("U8", (64, 2), 127)})
    (reason,) = plan_conversion(open_checkpoint(tmp_path), Options()).refusals
    assert "--map '*.weight=*.weight_mxscale:e8m0' pairs 1 of the 1." in reason
    plan = plan_conversion(open_checkpoint(tmp_path), Options(maps=("*.weight=*.weight_mxscale:e8m0",)))
    assert (plan.refusals, len(plan.weights)) == ((), 1)


@pytest.mark.parametrize("other", ["l.weight_amax", "l.input_scale", "l.k_scale"])
def test_what_no_weight_is_multiplied_by_is_not_suggested(tmp_path: Path, other: str) -> None:
    write_file(tmp_path / "model.safetensors", {"l.weight": WEIGHT, other: F32})
    (reason,) = plan_conversion(open_checkpoint(tmp_path), Options()).refusals
    assert f"look like a scale: {other}." in reason
    assert "--map '" not in reason


def test_a_scale_of_another_dtype_is_not_suggested(tmp_path: Path) -> None:
    write_file(tmp_path / "model.safetensors", {"l.weight": WEIGHT, "l.weight_qscale": ("I8", (4,), 1)})
    (reason,) = plan_conversion(open_checkpoint(tmp_path), Options()).refusals
    assert "--map '" not in reason
