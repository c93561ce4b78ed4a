"""The example: miniature V4.1 layers from a prepared checkpoint compute what the source's own values say."""

from __future__ import annotations

from pathlib import Path

import example_block
import pytest
import torch
from click.testing import CliRunner
from example_block import (
    LAYERS,
    WAYS,
    Agreement,
    caches_of,
    compare,
    distances,
    live_block,
    prepared_block,
    read_source,
    run_blocks,
    run_reference,
    streams_of_tokens,
)
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
def agreement(folders: tuple[Path, Path]) -> Agreement:
    return compare(*folders)


def test_prepared_and_live_layers_give_the_same_bits(agreement: Agreement) -> None:
    assert agreement.live_is_equal


def test_whole_chunks_tokens_and_drafts_agree(agreement: Agreement) -> None:
    assert agreement.between_ways < 1e-4


def test_layers_compute_what_the_source_says(agreement: Agreement) -> None:
    assert agreement.from_exact < 2e-4
    assert agreement.typically < 0.005
    assert agreement.from_served < 0.15
    assert agreement.holds


def test_ways_split_groups_wrap_the_window_and_reject_drafts() -> None:
    tokens = len(example_block.TOKENS)
    assert all(sum(kept for kept, _ in way) == tokens for way in WAYS.values())
    begins = [sum(size for size, _ in WAYS["chunks"][:step]) for step in range(len(WAYS["chunks"]))]
    assert {begin % 2 for begin in begins} == {0, 1}
    assert {rejected for _, rejected in WAYS["drafts"]} == {2}


@pytest.mark.parametrize(("layer", "weights"), [(0, 9), (2, 10)])
def test_parameters_and_attributes_are_those_of_the_live_path(
    folders: tuple[Path, Path], layer: int, weights: int
) -> None:
    live = dict(live_block(folders[0], layer).named_parameters())
    quantized = split = 0
    for name, parameter in prepared_block(folders[1], layer)[0].named_parameters():
        assert same_bytes(parameter, live[name]), name
        for attribute in ("sf", "_nki_scale", "_nki_weight", "_nki_fn_hi", "_nki_fn_lo"):
            assert hasattr(parameter, attribute) == hasattr(live[name], attribute), (name, attribute)
            if hasattr(parameter, attribute):
                assert same_bytes(getattr(parameter, attribute), getattr(live[name], attribute)), (name, attribute)
        quantized += hasattr(parameter, "_nki_weight")
        split += hasattr(parameter, "_nki_fn_hi")
    assert (quantized, split) == (weights, 2)


@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_is_left_without_memory(folders: tuple[Path, Path], layer: int) -> None:
    block, report = prepared_block(folders[1], layer)
    assert report.left_on_meta == ()
    assert not any(parameter.is_meta for parameter in block.parameters())
    assert report.tensors == len(list(block.parameters()))


@pytest.fixture(scope="module")
def blocks(folders: tuple[Path, Path]) -> dict[int, Block]:
    return {layer: prepared_block(folders[1], layer)[0] for layer in LAYERS}


@pytest.mark.parametrize("name", ["attn.wq_b.weight", "attn.indexer.wq_b.weight", "ffn.w13", "ffn.shared_w2.weight"])
def test_a_wrong_scale_would_be_noticed(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    source, output = folders
    block = prepared_block(output, 2)[0]
    scale = block.get_parameter(name)._nki_scale  # type: ignore[attr-defined]
    scale.add_(torch.arange(scale.numel()).view(scale.shape).remainder(2).to(torch.uint8))
    monkeypatch.setattr(example_block, "LAYERS", {2: ""})
    found = run_blocks({2: block}, streams_of_tokens(source), WAYS["chunks"])
    middle = distances(found, run_reference(source, AS_SERVED)).median()
    assert middle > 2 * example_block.TYPICAL_TOLERANCE


def test_entries_and_window_are_attended_to(folders: tuple[Path, Path], blocks: dict[int, Block]) -> None:
    """The last token alone, after the others and without what each cache remembers of them."""
    streams, last = streams_of_tokens(folders[0]), len(example_block.TOKENS) - 1
    caches = caches_of(blocks)
    choice = None
    for layer, block in blocks.items():
        _, choice = block(streams[:last], caches[layer], torch.arange(last, dtype=torch.int32), choice)
    position, choice = torch.tensor([last], dtype=torch.int32), None
    for layer, block in blocks.items():
        found, after = block(streams[last:], caches[layer], position, choice)
        for forgotten in ("window", "compressed") if layer else ("window",):
            emptied = {name: tensor.clone() for name, tensor in caches[layer]._asdict().items()}
            emptied[forgotten].zero_()
            other, _ = block(streams[last:], type(caches[layer])(**emptied), position, choice)
            assert not torch.equal(found, other), (layer, forgotten)
        choice = after


def test_later_layers_choose_within_the_candidates(folders: tuple[Path, Path], blocks: dict[int, Block]) -> None:
    streams, tokens = streams_of_tokens(folders[0]), len(example_block.TOKENS)
    caches, positions = caches_of(blocks), torch.arange(tokens, dtype=torch.int32)
    _, first = blocks[5](streams, caches[5], positions, None)
    _, second = blocks[6](streams, caches[6], positions, first)
    assert first is not None
    assert second is not None
    for one in (first, second):
        visible = torch.arange(1, tokens + 1)
        assert torch.equal((one.entries >= 0).sum(1), visible.clamp(max=6))
    allowed = [set(row.tolist()) for row in first.blocks]
    assert all(
        {e // 8 for e in row.tolist() if e >= 0} <= blocks for row, blocks in zip(second.entries, allowed, strict=True)
    )
    assert any(
        {e // 8 for e in row.tolist() if e >= 0} - blocks for row, blocks in zip(first.entries, allowed, strict=True)
    )


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


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_block, "LAYERS", {2: "ratio 2"})


@pytest.mark.usefixtures("one_layer")
def test_the_script_states_the_agreement() -> None:
    result = CliRunner().invoke(example_block.main)
    assert result.exit_code == 0, result.output
    assert "agree bit for bit" in result.output
    assert "layer 2, ratio 2: " in result.output


@pytest.mark.usefixtures("one_layer")
def test_the_script_fails_where_they_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example_block, "SERVED_TOLERANCE", 1e-9)
    result = CliRunner().invoke(example_block.main)
    assert result.exit_code == 1
    assert "do not compute what their checkpoint says" in result.output
