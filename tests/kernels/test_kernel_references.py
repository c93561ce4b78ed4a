"""The torch references against independent oracles: ml_dtypes for formats, plain loops for the rest."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from deepinfer_prep.kernels import reference

ALL_BYTES = np.arange(256, dtype=np.uint8)


def bits(values: torch.Tensor) -> torch.Tensor:
    """The bits of floats: tells -0 from 0."""
    return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def test_e4m3_decodes_as_the_hardware_does() -> None:
    expected = torch.from_numpy(ALL_BYTES.view(ml_dtypes.float8_e4m3).astype(np.float32))
    decoded = reference.decode_e4m3(torch.from_numpy(ALL_BYTES))
    nan = expected.isnan()
    assert torch.equal(decoded.isnan(), nan)
    assert torch.equal(bits(decoded[~nan]), bits(expected[~nan]))


def test_e2m1_decodes_the_low_nibble_first() -> None:
    nibbles = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    expected = np.stack([nibbles[ALL_BYTES & 15], nibbles[ALL_BYTES >> 4]], axis=-1).reshape(-1)
    decoded = reference.decode_e2m1(torch.from_numpy(ALL_BYTES))
    assert torch.equal(bits(decoded), bits(torch.from_numpy(expected)))


def test_e8m0_decodes_exactly_in_float64() -> None:
    expected = ALL_BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    decoded = reference.decode_e8m0_exact(torch.from_numpy(ALL_BYTES)).numpy()
    np.testing.assert_array_equal(decoded, expected)


def test_e8m0_as_kernels_read_it_differs_at_both_ends_only() -> None:
    codes = torch.from_numpy(ALL_BYTES)
    decoded, exact = reference.decode_e8m0(codes).double(), reference.decode_e8m0_exact(codes)
    assert torch.equal(decoded[1:255], exact[1:255])
    assert decoded[0] == 0.0
    assert decoded[255] == torch.inf


@pytest.mark.parametrize(
    ("dequantize", "bytes_a_row", "scale_shape", "block"),
    [
        (reference.dequantize_fp8, 128, (3, 4), (32, 32)),
        (reference.dequantize_fp4, 64, (96, 4), (1, 32)),
        (reference.dequantize_block128, 128, (1, 1), (128, 128)),
    ],
)
def test_dequantizing_multiplies_each_block(
    dequantize: object, bytes_a_row: int, scale_shape: tuple[int, int], block: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(0)
    w = torch.randint(0, 0x78, (96, bytes_a_row), generator=generator, dtype=torch.uint8)
    is_float = block == (128, 128)
    scale = torch.rand(scale_shape) if is_float else torch.randint(100, 140, scale_shape, dtype=torch.uint8)
    value = reference.decode_e2m1(w) if bytes_a_row == 64 else reference.decode_e4m3(w)
    factor = scale if is_float else reference.decode_e8m0(scale)
    result = dequantize(w, scale)  # type: ignore[operator]
    for row, column in ((0, 0), (31, 31), (32, 32), (95, 127), (40, 63), (64, 96)):
        expected = value[row, column] * factor[row // block[0], column // block[1]]
        assert result[row, column] == expected, (row, column)


def test_sinkhorn_is_doubly_stochastic() -> None:
    comb = reference.sinkhorn(torch.randn(50, 4, 4, dtype=torch.float64))
    assert torch.allclose(comb.sum(-2), torch.ones(50, 4, dtype=torch.float64), atol=1e-5)
    assert torch.allclose(comb.sum(-1), torch.ones(50, 4, dtype=torch.float64), atol=1e-3)


def test_mixes_of_one_token_by_hand() -> None:
    residual, fn = torch.randn(1, 4, 8).bfloat16(), torch.randn(24, 32)
    scale, base = torch.tensor([0.5, 2.0, 1.5]), torch.randn(24)
    pre, post, comb = reference.mixes(residual, fn, scale, base, torch.float64)
    x = residual.double().flatten().numpy()
    raw = fn.double().numpy() @ x / np.sqrt((x * x).mean() + 1e-20)
    logits = raw * np.repeat(scale.double().numpy(), [4, 4, 16]) + base.double().numpy()
    np.testing.assert_allclose(pre[0], 1 / (1 + np.exp(-logits[:4])) + 1e-6, rtol=1e-12)
    np.testing.assert_allclose(post[0], 2 / (1 + np.exp(-logits[4:8])), rtol=1e-12)
    matrix = np.exp(logits[8:].reshape(4, 4))
    matrix = matrix / matrix.sum(1, keepdims=True) + 1e-6
    matrix /= matrix.sum(0) + 1e-6
    for _ in range(19):
        matrix /= matrix.sum(1, keepdims=True) + 1e-6
        matrix /= matrix.sum(0) + 1e-6
    np.testing.assert_allclose(comb[0], matrix, rtol=1e-12)


def test_halves_of_fn_are_exact_in_fp32() -> None:
    residual, fn = torch.randn(3, 4, 16).bfloat16(), torch.randn(24, 64)
    hi = fn.bfloat16()
    lo = (fn - hi.float()).bfloat16()
    halves = reference.hc_mixes(residual, hi, lo, torch.ones(3), torch.zeros(24))
    whole = reference.mixes(residual, hi.double() + lo.double(), torch.ones(3), torch.zeros(24), torch.float64)
    for result, expected in zip(halves, whole, strict=True):
        assert (result.double() - expected).abs().max() <= 1e-5


def test_a_gate_other_than_one_gives_zeros() -> None:
    x, w, scale = torch.randn(2, 128).bfloat16(), torch.zeros(256, 64, dtype=torch.uint8) + 0x22, torch.tensor(127)
    scale = scale.to(torch.uint8).expand(256, 4)
    open_gate = reference.fp4_linear_2core_gated(x, w, scale, torch.tensor([[1]], dtype=torch.int32))
    assert torch.equal(open_gate, reference.fp4_linear(x, w, scale))
    for flag in (0, -1, 2):
        closed = reference.fp4_linear_2core_gated(x, w, scale, torch.tensor([[flag]], dtype=torch.int32))
        assert closed.dtype == torch.bfloat16
        assert not closed.any()


def test_references_compile_whole() -> None:
    x, w = torch.randn(2, 256).bfloat16(), torch.randint(0, 0x78, (64, 256), dtype=torch.uint8)
    packed = torch.randint(0, 256, (64, 128), dtype=torch.uint8)
    blocks, rows = torch.full((2, 8), 120, dtype=torch.uint8), torch.full((64, 8), 120, dtype=torch.uint8)
    trunk, fn = torch.randn(2, 4, 64).bfloat16(), torch.randn(24, 256).bfloat16()
    calls = [
        (reference.fp8_linear_raw, (x, w, blocks)),
        (reference.fp8_linear, (x, w, blocks)),
        (reference.fp4_linear, (x, packed, rows)),
        (reference.fp8_linear_block128, (x, w, torch.rand(1, 2))),
        (reference.hc_mixes, (trunk, fn, fn, torch.ones(3), torch.zeros(24))),
        (reference.hc_attn_out, (trunk[:, 0], trunk, torch.rand(2, 4), torch.rand(2, 4, 4))),
    ]
    for function, arguments in calls:
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        result, expected = compiled(*arguments), function(*arguments)
        pairs = zip(result, expected, strict=True) if isinstance(expected, tuple) else [(result, expected)]
        assert all(torch.equal(a, b) for a, b in pairs), function.__name__


def test_references_need_no_nki() -> None:
    code = (
        "import sys; sys.modules['nki'] = None\n"
        "import deepinfer_prep.kernels, deepinfer_prep.kernels.reference\n"
        "try:\n    import deepinfer_prep.kernels.blockquant\n"
        "except ImportError:\n    print('kernels need nki')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "kernels need nki\n"
