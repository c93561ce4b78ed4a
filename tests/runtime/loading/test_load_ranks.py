"""Tensor- and expert-parallel loads of a sample: all ranks together hold the whole, and each reads its share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from make_checkpoint import SampleOptions, write_checkpoint
from torch import nn

from deepinfer_prep.convert import convert_checkpoint
from deepinfer_prep.runtime.load import load_weights
from deepinfer_prep.runtime.loading.assembly import Target
from deepinfer_prep.runtime.loading.checkpoint import PreparedCheckpoint
from deepinfer_prep.runtime.loading.slices import Slice
from tests.runtime import prepared
from tests.runtime.models import frozen

Axis = Literal["rows", "columns"]
WORLD = 8
EXPERTS = 16
ATTRIBUTES = ("sf", "_nki_scale", "_nki_weight")
EXPERT = re.compile(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.(w[123])\.(weight|scale)")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_checkpoint(folder / "source", SampleOptions(hidden=128, layers=4, experts=EXPERTS))
    convert_checkpoint(folder / "source", folder / "output")
    return folder / "output"


@pytest.fixture(params=["mmap", "pread"])
def opened(request: pytest.FixtureRequest, output: Path) -> Iterator[PreparedCheckpoint]:
    with PreparedCheckpoint(output, access=request.param) as checkpoint:
        yield checkpoint


@dataclass(frozen=True)
class Layout:
    """A deployment: by which axis each tensor is cut, None for a tensor that every rank holds."""

    world: int
    axis_of: Callable[[str], Axis | None]

    def part(self, checkpoint: PreparedCheckpoint, rank: int, name: str) -> Slice | None:
        axis = self.axis_of(name)
        return None if axis is None else checkpoint.share(name, axis, rank, self.world)


def build(checkpoint: PreparedCheckpoint, names: list[str], part: Callable[[str], Slice | None]) -> nn.Module:
    """A meta model with one parameter for each of `names`, as large as the rank's part."""
    model = nn.Module()
    with torch.device("meta"):
        for name in names:
            stored, cut = checkpoint.tensor(name), part(name)
            shape = list(stored.shape)
            if cut is not None:
                for axis, wanted in ((0, cut.rows), (1, cut.columns)):
                    if wanted is not None:
                        shape[axis] = wanted[1] - wanted[0]
            module = model
            *path, leaf = name.split(".")
            for piece in path:
                module._modules.setdefault(piece, nn.Module())
                module = module._modules[piece]  # type: ignore[assignment]
            setattr(module, leaf, frozen(torch.zeros(shape, dtype=stored.dtype)))
    return model


def load_rank(checkpoint: PreparedCheckpoint, names: list[str], layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    part = partial(layout.part, checkpoint, rank)
    model = build(checkpoint, names, part)
    load_weights(model, checkpoint, rename=lambda name: name if name in names else None, slices=part, progress=False)
    return dict(model.named_parameters())


def weights_of(checkpoint: PreparedCheckpoint, *, of: str) -> list[str]:
    return [name for name in checkpoint.manifest.weights if re.search(of, name)]


def codes(tensor: torch.Tensor, field: str | None) -> torch.Tensor:
    """The bytes of a parameter, or of what is attached to it."""
    found = tensor if field is None else getattr(tensor, field)
    assert isinstance(found, torch.Tensor)
    return found.detach().view(torch.uint8)


def check_ranks_equal_whole(checkpoint: PreparedCheckpoint, names: list[str], axis: Axis, world: int) -> None:
    layout = Layout(world, lambda name: axis)
    ranks = [load_rank(checkpoint, names, layout, rank) for rank in range(world)]
    whole = load_rank(checkpoint, names, Layout(1, lambda name: None), 0)
    dimension = ("rows", "columns").index(axis)
    for name in names:
        for field in (None, *ATTRIBUTES):
            if field is not None and not hasattr(whole[name], field):
                continue
            pieces = [codes(rank[name], field) for rank in ranks]
            expected = codes(whole[name], field)
            if expected.shape[dimension] == 1:
                # One block is as wide as the matrix, and every rank takes a part of it with its scale.
                assert all(torch.equal(piece, expected) for piece in pieces), (name, field)
            else:
                assert torch.equal(torch.cat(pieces, dimension), expected), (name, field)


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_tensor_parallel_ranks_make_up_the_whole(opened: PreparedCheckpoint, axis: Axis, world: int) -> None:
    names = weights_of(opened, of=r"^layers\.[01]\.(attn|ffn\.shared_experts)\.")
    names += weights_of(opened, of=r"engram\.(embed|wkv)") + weights_of(opened, of=r"^layers\.0\.ffn\.experts\.[0-3]\.")
    assert len(names) > 25
    check_ranks_equal_whole(opened, names, axis, world)


def test_rows_that_end_in_an_edge_block(opened: PreparedCheckpoint) -> None:
    (name, other) = weights_of(opened, of=r"engram\.embed")
    assert opened.tensor(name).shape[0] % 32
    assert opened.tensor(other).shape[0] % 32
    check_ranks_equal_whole(opened, [name, other], "rows", WORLD)


def test_edge_blocks_of_a_matrix_with_a_kernel_scale(tmp_path: Path) -> None:
    tensors = {"a.weight": prepared.fp8((1000, 328)), "a.scale": prepared.e8m0((32, 11))}
    with PreparedCheckpoint(prepared.prepare(tmp_path, tensors)) as checkpoint:
        for axis in ("rows", "columns"):
            for world in (2, 3, 8):
                check_ranks_equal_whole(checkpoint, ["a.weight"], axis, world)  # type: ignore[arg-type]


class Experts(nn.Module):
    """The experts of some layers that one rank holds, gate and up projection in one parameter."""

    def __init__(self, checkpoint: PreparedCheckpoint, layers: int, count: int) -> None:
        super().__init__()
        first = "layers.0.ffn.experts.0."
        inner, packed = checkpoint.tensor(first + "w1.weight").shape
        wide, packed_inner = checkpoint.tensor(first + "w2.weight").shape
        for layer in range(layers):
            held = nn.Module()
            held.w13 = frozen(torch.zeros(count, 2 * inner, packed, dtype=torch.int8))
            held.w2 = frozen(torch.zeros(count, wide, packed_inner, dtype=torch.int8))
            self.add_module(f"layer{layer}", held)


def expert_rename(first: int, count: int, name: str) -> Target | None:
    match = EXPERT.fullmatch(name)
    if match is None or match[4] == "scale" or not first <= int(match[2]) < first + count:
        return None
    place = f"layer{match[1]}." + ("w2" if match[3] == "w2" else "w13")
    return Target(place, int(match[2]) - first, part=int(match[3] == "w3"))


def load_experts(checkpoint: PreparedCheckpoint, first: int, count: int) -> Experts:
    with torch.device("meta"):
        model = Experts(checkpoint, 4, count)
    load_weights(model, checkpoint, rename=partial(expert_rename, first, count), progress=False)
    return model


@pytest.mark.parametrize("world", [2, WORLD])
def test_expert_parallel_ranks_make_up_the_whole(opened: PreparedCheckpoint, world: int) -> None:
    each = EXPERTS // world
    whole = dict(load_experts(opened, 0, EXPERTS).named_parameters())
    ranks = [dict(load_experts(opened, rank * each, each).named_parameters()) for rank in range(world)]
    assert len(whole) == 8
    for name, expected in whole.items():
        for field in (None, *ATTRIBUTES):
            pieces = [codes(rank[name], field) for rank in ranks]
            assert torch.equal(torch.cat(pieces), codes(expected, field))
    weight = whole["layer2.w13"]
    one = torch.cat([opened.read(f"layers.2.ffn.experts.5.{matrix}.weight") for matrix in ("w1", "w3")])
    assert torch.equal(weight[5], one)


def test_a_rank_of_eight_experts_reads_an_eighth_of_their_bytes(output: Path) -> None:
    whole, one = PreparedCheckpoint(output, access="pread"), PreparedCheckpoint(output, access="pread")
    load_experts(whole, 0, EXPERTS)
    load_experts(one, 3 * EXPERTS // WORLD, EXPERTS // WORLD)
    names = [name for name in whole.names if (match := EXPERT.fullmatch(name)) and int(match[1]) < 4]
    assert whole.bytes_read == sum(whole.tensor(name).nbytes for name in names)
    assert one.bytes_read * WORLD == whole.bytes_read


def test_a_rank_of_eight_rows_reads_an_eighth_of_the_bytes(output: Path) -> None:
    checkpoint = PreparedCheckpoint(output, access="pread")
    names = weights_of(checkpoint, of=r"^layers\.\d\.attn\.wq_b|engram\.embed")
    sizes = [checkpoint.tensor(name).nbytes for name in names]
    sizes += [checkpoint.tensor(checkpoint.record(name).scale).nbytes for name in names]
    read = []
    for rank in range(WORLD):
        before = checkpoint.bytes_read
        load_rank(checkpoint, names, Layout(WORLD, lambda name: "rows"), rank)
        read.append(checkpoint.bytes_read - before)
    assert sum(read) == sum(sizes)
    assert max(read) < 1.02 * sum(sizes) / WORLD


def test_a_rank_of_eight_columns_reads_an_eighth_where_its_piece_of_a_row_fills_a_page(tmp_path: Path) -> None:
    tensors = {"a.weight": prepared.fp8((64, 8 * 4096)), "a.scale": prepared.e8m0((2, 1024))}
    checkpoint = PreparedCheckpoint(prepared.prepare(tmp_path, tensors))
    load_rank(checkpoint, ["a.weight"], Layout(WORLD, lambda name: "columns"), 5)
    weight, scale = 64 * 8 * 4096, 2 * 1024
    assert weight // WORLD <= checkpoint.bytes_read <= weight // WORLD + scale
