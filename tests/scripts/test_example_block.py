"""The example: a miniature V4.1 block from a prepared checkpoint computes what the source's own values say."""

from __future__ import annotations

from pathlib import Path

import example_block
import pytest
import torch
from click.testing import CliRunner
from example_block import compare, dims_of, live_block, prepared_block, read_source, run_block, run_reference
from example_model import Block
from example_reference import AS_SERVED, dequantize
from make_checkpoint import source_values, write_checkpoint

from deepinfer_prep.convert import convert_checkpoint
from tests.runtime.prepared import same_bytes


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("example")
    write_checkpoint(root / "source", example_block.SAMPLE)
    convert_checkpoint(root / "source", root / "output")
    return root / "source", root / "output"


@pytest.fixture(scope="module")
def block(folders: tuple[Path, Path]) -> Block:
    return prepared_block(folders[1])[0]


def test_the_three_ways_agree(folders: tuple[Path, Path], block: Block) -> None:
    source, _ = folders
    agreement = compare(run_block(block, source), run_block(live_block(source), source), source)
    assert agreement.live_is_equal
    assert agreement.from_served < 0.04
    assert agreement.from_exact < 0.15
    assert agreement.holds


def test_parameters_and_attributes_are_those_of_the_live_path(folders: tuple[Path, Path], block: Block) -> None:
    live = dict(live_block(folders[0]).named_parameters())
    quantized = split = 0
    for name, parameter in block.named_parameters():
        assert same_bytes(parameter, live[name]), name
        for attribute in ("sf", "_nki_scale", "_nki_weight", "_nki_fn_hi", "_nki_fn_lo"):
            assert hasattr(parameter, attribute) == hasattr(live[name], attribute), (name, attribute)
            if hasattr(parameter, attribute):
                assert same_bytes(getattr(parameter, attribute), getattr(live[name], attribute)), (name, attribute)
        quantized += hasattr(parameter, "_nki_weight")
        split += hasattr(parameter, "_nki_fn_hi")
    assert (quantized, split) == (9, 2)


def test_nothing_is_left_without_memory(folders: tuple[Path, Path]) -> None:
    block, report = prepared_block(folders[1])
    assert report.left_on_meta == ()
    assert not any(parameter.is_meta for parameter in block.parameters())
    assert report.tensors == len(list(block.parameters()))


@pytest.mark.parametrize("name", ["attn.wq_b.weight", "ffn.w13", "ffn.shared_w2.weight"])
def test_a_wrong_scale_would_be_noticed(folders: tuple[Path, Path], name: str) -> None:
    source, output = folders
    block = prepared_block(output)[0]
    block.get_parameter(name)._nki_scale.add_(1)  # type: ignore[attr-defined]
    served = run_reference(source, AS_SERVED)
    assert example_block.distance(run_block(block, source), served) > 2 * example_block.SERVED_TOLERANCE


def test_each_step_attends_to_the_steps_before(folders: tuple[Path, Path], block: Block) -> None:
    source, _ = folders
    together = run_block(block, source)
    alone = [
        block(streams, torch.zeros(1, dims_of(source).head_dim, dtype=torch.bfloat16), torch.tensor([0]))
        for streams in example_block.streams_of_tokens(source)
    ]
    assert torch.equal(together[0], alone[0])
    assert not any(torch.equal(one, other) for one, other in zip(together[1:], alone[1:], strict=True))


@pytest.mark.parametrize(
    ("module", "one", "relative", "absolute"),
    [("layers.0.attn.wkv", 0x38, 2**-4, 2**-10), ("layers.0.ffn.experts.1.w2", 0x22, 0.2, 0.25)],
)
def test_the_reference_dequantizes_to_the_values_before_quantization(
    folders: tuple[Path, Path], tmp_path: Path, module: str, one: int, relative: float, absolute: float
) -> None:
    """Within half a step of the format: a part of the value, and near zero a part of the block's scale."""
    sample = write_checkpoint(tmp_path / "again", example_block.SAMPLE)
    tensors = read_source(folders[0])
    weight, scale = tensors[f"{module}.weight"], tensors[f"{module}.scale"]
    entry = next(entry for entry in sample.entries if entry.name == f"{module}.weight")
    values = torch.from_numpy(source_values(entry, sample.seed)).double()
    scales = dequantize(torch.full_like(weight.view(torch.uint8), one).view(weight.dtype), scale)
    error = (dequantize(weight, scale) - values).abs()
    assert (error <= 1.0001 * torch.maximum(relative * values.abs(), absolute * scales)).all()
    assert (error > 0.5 * torch.maximum(relative * values.abs(), absolute * scales)).any()


def test_the_script_states_the_agreement() -> None:
    result = CliRunner().invoke(example_block.main)
    assert result.exit_code == 0, result.output
    assert "agree bit for bit" in result.output
    assert result.output.count("token ") == len(example_block.TOKENS)


def test_the_script_fails_where_they_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_block, "SERVED_TOLERANCE", 1e-9)
    result = CliRunner().invoke(example_block.main)
    assert result.exit_code == 1
    assert "does not compute what its checkpoint says" in result.output
