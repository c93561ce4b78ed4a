"""The fp8 round trip of activations: reference against an oracle, kernel against reference, bit for bit."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nki_emulator import Options, installed, run

from tests.kernels.cases import ON_SIMULATOR, blockquant, reference

with installed():
    import nki
    import nki.isa as nisa
    import nki.language as nl

    from deepinfer_prep.kernels import load_x, tile_pool

BF16 = [code for code in range(1 << 16) if code & 0x7FFF < 0x7F00]
"""Bits of all bf16 numbers below 2^127; rounding up to e4m3 takes the very largest beyond bf16."""


@nki.jit
def round_trip_kernel(x: Any) -> Any:
    """The kernels' own round trip of x bf16 [rows, k], alone."""
    out = nl.ndarray(x.shape, dtype=nl.bfloat16, buffer=nl.shared_hbm)
    tile = nl.ndarray(x.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    load_x.fp8_round_trip(tile_pool.new_pool(), tile)
    nisa.dma_copy(dst=out, src=tile)
    return out


def oracle(block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The round trip of one block, with an exactly computed scale and ml_dtypes' rounding."""
    amax = max(Fraction(float(np.abs(block).max())), Fraction(float(np.float32(1e-4))))
    exponent = -200
    while amax > 224 * Fraction(2) ** exponent:
        exponent += 1
    codes = np.ldexp(block.astype(np.float64), -exponent).astype(ml_dtypes.float8_e4m3)
    return np.ldexp(codes.astype(np.float64), exponent)


def check_reference(x: torch.Tensor) -> None:
    result = reference.fp8_round_trip(x).double().numpy().reshape(-1, 32)
    for block, values in zip(x.double().numpy().reshape(-1, 32), result, strict=True):
        np.testing.assert_array_equal(values, oracle(block))


def test_every_bf16_number_alone_in_its_block() -> None:
    codes = torch.tensor(BF16, dtype=torch.int32).to(torch.int16)
    x = torch.zeros(len(codes), 32, dtype=torch.bfloat16)
    x[:, 5] = codes.view(torch.bfloat16)
    result = reference.fp8_round_trip(x)[:, 5].double()
    half_step = (x[:, 5].double().abs() * 2.0**-4).clamp(min=2.0**-31)
    assert bool(((result - x[:, 5].double()).abs() <= half_step).all())
    check_reference(x[:: len(codes) // 500])


@pytest.mark.parametrize("exponent", range(-13, 100, 7))
def test_boundaries_of_the_scale(exponent: int) -> None:
    limit = torch.tensor(224.0 * 2.0**exponent, dtype=torch.bfloat16)
    step = torch.tensor([-1, 0, 1], dtype=torch.int16)
    x = torch.zeros(3, 32, dtype=torch.bfloat16)
    x[:, 0] = (limit.view(torch.int16) + step).view(torch.bfloat16)
    x[:, 1] = x[:, 0] / 3
    check_reference(x)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(BF16), min_size=32, max_size=32))
def test_any_block(codes: list[int]) -> None:
    check_reference(torch.tensor(codes, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(1, 32))


def adversarial(rows: int, k: int) -> torch.Tensor:
    """Blocks of every magnitude, of zeros, with one outlier, with half-way values, at and beyond a scale's limit."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, k // 32, 32, generator=generator)
    x *= torch.exp2(torch.randint(-40, 40, (rows, k // 32, 1), generator=generator).float())
    shuffled = torch.randperm(k // 32, generator=generator).tolist()
    for block, kind in zip(shuffled, itertools.cycle(range(6)), strict=False):
        if kind == 0:
            x[:, block] = 0.0 if block % 2 else -0.0
        elif kind == 1:
            x[:, block, 7] = 1e30
        elif kind == 2:
            x[:, block] = 1.0625 * torch.arange(-16, 16)
        elif kind in (3, 4):
            x[:, block] = torch.rand(rows, 32, generator=generator) * 220
            x[:, block, 31] = -224.0 if kind == 3 else 225.0
            x[:, block] *= 2.0 ** (block % 40 - 12)
    return x.reshape(rows, k).to(torch.bfloat16)


@pytest.mark.parametrize(("rows", "k"), [(1, 128), (3, 256), (16, 640), (128, 4224)])
@pytest.mark.parametrize("flush", [False] if ON_SIMULATOR else [False, True])
def test_kernel_equals_reference_bit_for_bit(rows: int, k: int, flush: bool) -> None:
    x = adversarial(rows, k)
    result = run(round_trip_kernel, x, options=Options(flush_subnormals=True) if flush else None).output
    assert torch.equal(result.view(torch.int16), reference.fp8_round_trip(x).view(torch.int16))


@pytest.mark.parametrize("m", [1, 3, 16, 32, 64, 128, 200, 512])
def test_fp8_linear_multiplies_exactly_the_round_trip(m: int) -> None:
    k = 384
    identity = torch.eye(k, dtype=torch.uint8) * 0x38
    ones = torch.full((k // 32, k // 32), 127, dtype=torch.uint8)
    x = adversarial(m, k)
    assert torch.equal(run(blockquant.fp8_linear, x, identity, ones).output, reference.fp8_round_trip(x))
