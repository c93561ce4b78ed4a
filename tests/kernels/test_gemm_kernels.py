"""The GEMM kernels against float64, on one core and two, gated, and at the limits of their arguments."""

from __future__ import annotations

import inspect

import pytest
import torch
from nki_emulator import Options, TensorSpec, count, run

from tests.kernels.cases import (
    FILLS,
    GEMMS,
    KMAJOR,
    ON_SIMULATOR,
    Case,
    Gemm,
    blockquant,
    error_ratio,
    make_case,
    reference,
)

ROWS = (1, 3, 16, 32, 64, 128, 200, 512)
SIZES = ((64, 128), (160, 384), (256, 640), (32, 1152), (96, 2304))
"""(n, k) with every kind of remainder: of row tiles, of k tiles, of rows that share a partition."""

BY_NAME = {gemm.name: gemm for gemm in GEMMS}
FLUSH = Options(flush_subnormals=True)

emulator_only = pytest.mark.skipif(ON_SIMULATOR, reason="AWS's simulator keeps no record and flushes no subnormals")
all_gemms = pytest.mark.parametrize("gemm", GEMMS, ids=lambda gemm: gemm.name)


def size_for(m: int, fill: str) -> tuple[int, int]:
    """Spreads the sizes over the cases."""
    return SIZES[(m + FILLS.index(fill)) % len(SIZES)]


@all_gemms
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("fill", FILLS)
def test_meets_the_bound_against_float64(gemm: Gemm, m: int, fill: str) -> None:
    case = make_case(gemm, m, *size_for(m, fill), fill)
    y = run(gemm.kernel(1), *case.arguments).output
    assert y.dtype == torch.bfloat16
    assert error_ratio(gemm, case, y) <= 1.0


@all_gemms
@pytest.mark.parametrize("n", [32, 96, 160, 288, 544, 1056])
@pytest.mark.parametrize("m", [2, 48])
def test_any_number_of_output_columns(gemm: Gemm, n: int, m: int) -> None:
    case = make_case(gemm, m, n, 256)
    assert error_ratio(gemm, case, run(gemm.kernel(1), *case.arguments).output) <= 1.0


@all_gemms
@pytest.mark.parametrize("k", range(128, 1665, 128))
def test_any_multiple_of_128_columns_of_x(gemm: Gemm, k: int) -> None:
    for m in (1, 20):
        case = make_case(gemm, m, 64, k)
        assert error_ratio(gemm, case, run(gemm.kernel(1), *case.arguments).output) <= 1.0


@all_gemms
@pytest.mark.parametrize("m", [6, 7, 24, 25, 129, 256, 257, 511])
def test_number_of_rows_on_both_sides_of_every_change_of_plan(gemm: Gemm, m: int) -> None:
    case = make_case(gemm, m, 160, 384)
    assert error_ratio(gemm, case, run(gemm.kernel(1), *case.arguments).output) <= 1.0


def small_integers(gemm: Gemm, m: int, n: int, k: int) -> Case:
    """Arguments whose partial sums are integers below 2^24 and whose results are exact in fp32."""
    case = make_case(gemm, m, n, k)
    x = torch.randint(-3, 4, (m, k), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    if gemm.codes_per_byte == 2:
        return Case(gemm, x, case.w & 0xEE, torch.full_like(case.scale, 127))
    integers = torch.tensor([0.0, 1.0, -1.0, 2.0, 3.0, -5.0, 7.0]).to(torch.float8_e4m3fn).view(torch.uint8)
    scale = torch.full_like(case.scale, 1.0 if gemm.scale_bytes is None else 127)
    return Case(gemm, x, integers[case.w.int() % len(integers)], scale)


@all_gemms
@pytest.mark.parametrize("m", ROWS)
def test_exact_sums_are_rounded_once(gemm: Gemm, m: int) -> None:
    case = small_integers(gemm, m, 96, 640)
    exact = gemm.oracle_input(case.x).double() @ gemm.dequantize(case.w, case.scale, torch.float64).T
    assert torch.equal(exact, exact.float().double()), "the sums must be exact for this test to say anything"
    assert torch.equal(run(gemm.kernel(1), *case.arguments).output, exact.to(torch.bfloat16))


@pytest.mark.parametrize("m", [1, 4, 64])
@pytest.mark.parametrize("name", ["fp8_linear_raw", "fp4_linear_raw", "fp8_linear_raw_kmajor", "fp4_linear_raw_kmajor"])
def test_every_code_and_scale_is_dequantized_exactly(name: str, m: int) -> None:
    """A row of x with a single one picks a column of the dequantized weight, which bf16 must hold as it is."""
    gemm = BY_NAME[name]
    assert gemm.scale_bytes is not None
    n, k = 256, 256
    case = make_case(gemm, m, n, k, "all codes")
    low, high = gemm.scale_bytes
    scale = torch.arange(case.scale.numel()).reshape(case.scale.shape) % (high - low + 1) + low
    for first in range(0, k if m == 64 else 8 * m, m):
        x = torch.zeros(m, k, dtype=torch.bfloat16)
        x[torch.arange(m), torch.arange(first, first + m)] = 1.0
        one = Case(gemm, x, case.w, scale.to(torch.uint8))
        y = run(gemm.kernel(1), *one.arguments, options=None if ON_SIMULATOR else FLUSH).output
        exact = gemm.dequantize(case.w, scale.to(torch.uint8), torch.float64)[:, first : first + m].T
        assert torch.equal(y.double(), exact)


@all_gemms
@pytest.mark.parametrize("m", ROWS)
def test_two_cores_equal_one_bit_for_bit(gemm: Gemm, m: int) -> None:
    n, k = ((768, 1280), (256, 384))[ROWS.index(m) % 2]
    case = make_case(gemm, m, n, k)
    one, two = run(gemm.kernel(1), *case.arguments), run(gemm.kernel(2), *case.arguments, grid=2)
    assert torch.equal(one.output.view(torch.int16), two.output.view(torch.int16))


@emulator_only
@all_gemms
@pytest.mark.parametrize("m", [1, 64])
@pytest.mark.parametrize("fill", [fill for fill in FILLS if fill != "lowest scales"])
def test_flushing_subnormals_changes_nothing(gemm: Gemm, m: int, fill: str) -> None:
    case = make_case(gemm, m, *size_for(m, fill), fill)
    kept = run(gemm.kernel(1), *case.arguments).output
    flushed = run(gemm.kernel(1), *case.arguments, options=FLUSH).output
    assert torch.equal(kept.view(torch.int16), flushed.view(torch.int16))


@emulator_only
@all_gemms
@pytest.mark.parametrize("m", [1, 16, 200])
def test_lowest_scales_lose_only_what_is_flushed(gemm: Gemm, m: int) -> None:
    """Weights whose dequantized value is a subnormal fp32 number, and scale byte 0, may count as zero."""
    case = make_case(gemm, m, 96, 640, "lowest scales")
    assert error_ratio(gemm, case, run(gemm.kernel(1), *case.arguments, options=FLUSH).output) <= 1.0


@pytest.mark.parametrize("layout", ["", KMAJOR])
@pytest.mark.parametrize("m", [1, 16, 130])
def test_gated_kernel_runs_for_a_flag_of_one(m: int, layout: str) -> None:
    gemm = BY_NAME[f"fp4_linear{layout}"]
    case = make_case(gemm, m, 512, 640)
    expected = run(gemm.kernel(2), *case.arguments, grid=2).output
    flag = torch.tensor([[1]], dtype=torch.int32)
    gated = run(getattr(blockquant, f"{gemm.name}_2core_gated"), *case.arguments, flag, grid=2).output
    assert torch.equal(gated.view(torch.int16), expected.view(torch.int16))


@emulator_only
@pytest.mark.parametrize("layout", ["", KMAJOR])
@pytest.mark.parametrize("m", [1, 16, 130])
@pytest.mark.parametrize("flag", [0, 2, -1, 5])
def test_gated_kernel_does_no_work_for_any_other_flag(m: int, flag: int, layout: str) -> None:
    gemm = BY_NAME[f"fp4_linear{layout}"]
    case = make_case(gemm, m, 512, 640)
    kernel = getattr(blockquant, f"{gemm.name}_2core_gated")
    gated = run(kernel, *case.arguments, torch.tensor([[flag]], dtype=torch.int32), grid=2)
    assert not gated.output.view(torch.int16).any()
    assert gated.instructions is not None
    for op in ("nc_matmul", "nc_transpose", "tensor_tensor", "activation"):
        assert count(gated.instructions, op) == 0, op
    loaded = [i.operand("src") for i in gated.instructions if i.op == "dma_copy" and i.operand("dst").buffer == "sbuf"]
    assert [operand.shape for operand in loaded] == [(1, 1), (1, 1)], "only the flag is read, by each core"


@all_gemms
@pytest.mark.parametrize(
    ("m", "n", "k", "cores", "complaint"),
    [
        (513, 64, 128, 1, "m is 513"),
        (1, 64, 192, 1, "k is 192"),
        (1, 48, 128, 1, "n is 48"),
        (1, 128, 128, 2, "n is 128"),
        (1, 384, 128, 2, "n is 384"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(gemm: Gemm, m: int, n: int, k: int, cores: int, complaint: str) -> None:
    case = make_case(gemm, m, n, k)
    with pytest.raises(AssertionError, match=complaint):
        run(gemm.kernel(cores), *case.arguments, grid=cores)


@emulator_only
@all_gemms
@pytest.mark.parametrize("m", [1, 16, 512])
def test_the_longest_rows_fit_on_chip(gemm: Gemm, m: int) -> None:
    """V4.1's longest contraction, 8192, within the 200 KiB a partition that careful kernels plan with."""
    n, k = 512, 8192
    rows, columns = gemm.scale_block
    weight = TensorSpec((n, k // gemm.codes_per_byte), "uint8")
    scale = TensorSpec((-(-n // rows), k // columns), "float32" if gemm.scale_bytes is None else "uint8")
    result = run(gemm.kernel(1), TensorSpec((m, k), "bfloat16"), weight, scale, options=Options(arithmetic=False))
    assert result.sbuf_peak is not None
    assert result.sbuf_peak <= 200 * 1024


@all_gemms
def test_an_infinity_stays_in_its_row(gemm: Gemm) -> None:
    """Without the round trip, which needs finite numbers."""
    if gemm.round_trip:
        pytest.skip("the round trip takes finite numbers only")
    for m in (3, 40):
        case = make_case(gemm, m, 64, 256)
        expected = run(gemm.kernel(1), *case.arguments).output
        case.x[1, 7] = torch.inf
        y = run(gemm.kernel(1), *case.arguments).output
        assert not y[1].isfinite().any()
        others = [row for row in range(m) if row != 1]
        assert torch.equal(y[others], expected[others])


def test_references_and_kernels_take_the_same_arguments() -> None:
    for name in [gemm.name for gemm in GEMMS] + ["fp4_linear_2core_gated", "fp4_linear_kmajor_2core_gated"]:
        kernel, function = getattr(blockquant, name), getattr(reference, name)
        assert list(inspect.signature(kernel).parameters) == list(inspect.signature(function).parameters)
