"""The dense window kernel is sparse attention over the last 128 tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from nki_emulator import installed, run
from torch import Tensor

from tests.kernels.test_sparse_attn import SINKS, Case

with installed():
    from deepinfer_prep.kernels import window_attn

WINDOW = 128


def case(t: int, heads: int, history: int, d: int = 128) -> tuple[Case, Tensor]:
    """`history` tokens before the first query are there; and which rows hold a key."""
    generator = torch.Generator().manual_seed(t + heads + history)
    rows = torch.arange(WINDOW + t)
    present = torch.where(rows < WINDOW - history, -1, rows).int()
    q = torch.randn(t, heads, d, generator=generator).bfloat16()
    kv = torch.randn(WINDOW + t, d, generator=generator).bfloat16()
    sink = torch.randn(heads, generator=generator)
    seen = torch.arange(t)[:, None] + 1 + torch.arange(WINDOW)
    idx = torch.where(present[seen] < 0, -1, seen).int()
    return Case(q, kv, sink, idx, d**-0.5), present


def found(one: Case, present: Tensor, cores: int = 1) -> Tensor:
    return run(window_attn.kernel, one.q, one.kv, present, one.sink, one.scale, grid=cores).output


@pytest.mark.parametrize(("t", "heads", "d"), [(64, 2, 128), (192, 4, 128), (64, 4, 512)])
@pytest.mark.parametrize("history", [0, 5, 128])
def test_queries_see_their_window(t: int, heads: int, d: int, history: int) -> None:
    one, present = case(t, heads, history, d)
    out = found(one, present)
    assert ((out.double() - one.exact()).abs() <= one.bound()).all()
    assert torch.equal(out, found(one, present, cores=2))


def test_what_lies_before_the_first_token_has_no_influence() -> None:
    one, present = case(64, 2, 5)
    nan = one.kv.clone()
    nan[: WINDOW - 5] = torch.nan
    assert torch.equal(found(replace(one, kv=nan), present), found(one, present))


@pytest.mark.parametrize("sink", SINKS)
def test_sinks_take_their_share(sink: float) -> None:
    one, present = case(64, 2, 3)
    one.sink[1] = sink
    assert ((found(one, present).double() - one.exact()).abs() <= one.bound()).all()


def test_large_scores_do_not_overflow() -> None:
    one, present = case(64, 2, 100)
    one = replace(one, q=one.q * 1000)
    assert ((found(one, present).double() - one.exact()).abs() <= one.bound()).all()
