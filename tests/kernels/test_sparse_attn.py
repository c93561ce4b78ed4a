"""The sparse attention kernel against float64 within a bound that follows from its roundings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from nki_emulator import Options, installed, run
from torch import Tensor

from deepinfer_prep.kernels import attention_reference
from tests.kernels.cases import ON_SIMULATOR

with installed():
    from deepinfer_prep.kernels import sparse_attn, sparse_attn_two_caches

SINKS = (-torch.inf, -1e4, 0.0, 50.0, torch.inf)
ROWS = 700


@dataclass(frozen=True)
class Case:
    """Arguments of one call."""

    q: Tensor
    kv: Tensor
    sink: Tensor
    idx: Tensor
    scale: float

    def found(self, cores: int = 1, **options: bool) -> Tensor:
        """The kernel's result."""
        arguments = (self.q, self.kv, self.sink, self.idx, self.scale)
        chosen = Options(**options) if options else None
        return run(sparse_attn.kernel, *arguments, grid=cores, options=chosen).output

    def exact(self) -> Tensor:
        """The result in float64."""
        return attention_reference.attention_values(self.q, self.kv, self.sink, self.idx, self.scale, torch.float64)

    def bound(self) -> Tensor:
        """What roundings of the result, of shares to bf16 and of large scores to fp32 may come to."""
        valid = self.idx >= 0
        rows = self.kv[torch.where(valid, self.idx, 0).long()].double()
        rows = torch.where(valid[..., None], rows, 0.0)
        scores = torch.einsum("thd,tkd->thk", self.q.double(), rows) * self.scale
        magnitude = torch.einsum("thd,tkd->thk", self.q.double().abs(), rows.abs()).amax(-1, keepdim=True) * self.scale
        scores = torch.where(valid[:, None], scores, -torch.inf)
        sinks = self.sink.double()[:, None].clamp(-1e30, 3e38)
        top = torch.maximum(scores.amax(-1, keepdim=True), sinks)
        shares = torch.exp(scores - top)
        weighed = torch.einsum("thk,tkd->thd", shares, rows.abs()) / (
            shares.sum(-1, keepdim=True) + torch.exp(sinks - top)
        )
        return 2.0**-8 * self.exact().abs() + (2.0**-8 + 2.0**-20 * (1 + magnitude)) * weighed + 2.0**-100


def lists(t: int, k: int, valid: int, place: str, generator: torch.Generator) -> Tensor:
    """`valid` distinct keys a query, the rest of the k entries -1: at the end, in the middle, or anywhere."""
    idx = torch.full((t, k), -1, dtype=torch.int32)
    for row in idx:
        places = {
            "end": torch.arange(valid),
            "middle": torch.cat([torch.arange(valid // 2), torch.arange(k - valid + valid // 2, k)]),
            "anywhere": torch.randperm(k, generator=generator)[:valid],
        }[place]
        row[places] = torch.randperm(ROWS, generator=generator)[:valid].int()
    return idx


def case(t: int, heads: int, k: int, valid: int, place: str = "anywhere", d: int = 128) -> Case:
    generator = torch.Generator().manual_seed(t + heads + k + valid)
    q = torch.randn(t, heads, d, generator=generator).bfloat16()
    kv = torch.randn(ROWS, d, generator=generator).bfloat16()
    sink = torch.randn(heads, generator=generator)
    return Case(q, kv, sink, lists(t, k, valid, place, generator), d**-0.5)


def check(one: Case) -> None:
    """Within the bound, and the same bits on two cores."""
    out = one.found()
    assert ((out.double() - one.exact()).abs() <= one.bound()).all()
    assert torch.equal(out, one.found(cores=2))


@pytest.mark.parametrize(
    ("k", "valid"),
    [(1, 0), (1, 1), (5, 0), (5, 1), (5, 5), (64, 5), (128, 127), (128, 128), (133, 128), (640, 127), (640, 640)],
)
@pytest.mark.parametrize("place", ["end", "middle", "anywhere"])
def test_lists_of_every_length_with_gaps_anywhere(k: int, valid: int, place: str) -> None:
    check(case(3, 16, k, valid, place))


@pytest.mark.parametrize(("t", "heads"), [(1, 64), (3, 8), (3, 64), (5, 33), (64, 16), (128, 8), (200, 8)])
def test_any_number_of_queries_and_heads(t: int, heads: int) -> None:
    check(case(t, heads, 5 if t > 5 else 64, 4))


def test_the_models_sizes() -> None:
    check(case(3, 64, 640, 620, d=512))


@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("valid", [0, 3])
def test_sinks_take_their_share_and_give_no_value(sink: float, valid: int) -> None:
    one = replace(case(3, 8, 5, valid), sink=torch.full((8,), sink))
    check(one)
    if valid == 0 or sink == torch.inf:
        assert torch.equal(one.found(), torch.zeros_like(one.q))


def test_sinks_of_all_kinds_at_once() -> None:
    one = case(3, 8, 64, 40)
    check(replace(one, sink=torch.tensor([*SINKS, 3.0, -2.0, 88.0])))


@pytest.mark.parametrize("valid", [0, 1, 3])
@pytest.mark.parametrize("heads", [8, 64])
def test_nan_behind_an_empty_entry_never_reaches_the_result(heads: int, valid: int) -> None:
    one = case(4, heads, 70, valid)
    unused = torch.ones(ROWS, dtype=torch.bool)
    unused[one.idx[one.idx >= 0].long()] = False
    one = replace(one, kv=one.kv.where(~unused[:, None], 1.0))
    spoilt = replace(one, kv=one.kv.where(~unused[:, None], torch.nan))
    assert unused[0]
    assert torch.equal(spoilt.found(), one.found())


def test_nan_in_a_key_spoils_its_query_and_nan_in_a_head_that_head() -> None:
    one = case(4, 8, 5, 3)
    one.kv[one.idx[2].max()] = torch.nan
    one.q[0, 5, 7] = torch.nan
    spoilt = one.found().isnan().any(-1)
    users = (one.idx == one.idx[2].max()).any(-1)
    expected = users[:, None].expand(-1, 8).clone()
    expected[0, 5] = True
    assert torch.equal(spoilt, expected)


@pytest.mark.parametrize("size", [1e2, 1e4])
def test_large_scores_do_not_overflow(size: float) -> None:
    one = case(3, 16, 64, 60)
    scores = torch.einsum("thd,nd->thn", one.q.double(), one.kv.double()) * one.scale
    one = replace(one, q=(one.q * (size / float(scores.abs().max()))).bfloat16())
    assert one.found().isfinite().all()
    check(one)


def test_the_order_of_a_list_means_nothing_but_rounding() -> None:
    one = case(3, 16, 133, 100)
    turned = replace(one, idx=one.idx.flip(-1))
    assert ((one.found().double() - turned.found().double()).abs() <= 2 * one.bound()).all()


@pytest.mark.parametrize(("k", "valid"), [(5, 4), (512, 300), (512, 0)])
@pytest.mark.parametrize("cores", [1, 2])
def test_keys_of_two_caches_share_one_softmax(k: int, valid: int, cores: int) -> None:
    one = case(3, 16, 128 + k, 0)
    generator = torch.Generator().manual_seed(k)
    window, other = lists(3, 128, 100, "end", generator), lists(3, k, valid, "anywhere", generator)
    half = torch.randn(ROWS, 128, generator=generator).bfloat16()
    together = replace(
        one, kv=torch.cat([one.kv, half]), idx=torch.cat([window, torch.where(other < 0, -1, other + ROWS)], dim=-1)
    )
    arguments = (one.q, one.kv, window, half, other, one.sink, one.scale)
    out = run(sparse_attn_two_caches.kernel, *arguments, grid=cores).output
    assert ((out.double() - together.exact()).abs() <= together.bound()).all()
    if k % 32 == 0:
        assert torch.equal(out, together.found(cores))


def test_an_empty_list_beside_a_cache_of_nan_leaves_the_other_cache_alone() -> None:
    one = case(3, 16, 128, 100)
    nothing, nan = torch.full((3, 64), -1, dtype=torch.int32), torch.full((9, 128), torch.nan).bfloat16()
    out = run(sparse_attn_two_caches.kernel, one.q, one.kv, one.idx, nan, nothing, one.sink, one.scale).output
    assert ((out.double() - one.exact()).abs() <= one.bound()).all()


@pytest.mark.skipif(ON_SIMULATOR, reason="flushing is an option of the emulator")
def test_flushed_subnormals_change_nothing_beyond_the_bound() -> None:
    one = replace(case(3, 16, 64, 60), sink=torch.full((16,), 85.0))
    flushed = one.found(flush_subnormals=True)
    assert ((flushed.double() - one.exact()).abs() <= one.bound()).all()
