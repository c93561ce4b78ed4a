"""Probes of the GEMM kernels: operands of TensorE, bit work, DMAs, and dynamic loops."""

from __future__ import annotations

from typing import Any

import torch
from nki_emulator import installed

from probe_kernels.forms import P, Probe, loaded, stored

with installed():
    import nki
    import nki.isa as nisa
    import nki.language as nl


TOP_BIT_MASK = 0x8E8E8E8E - (1 << 32)


@nki.jit  # type: ignore[untyped-decorator]
def stepped_stationary(codes: Any, x: Any) -> Any:
    """Every second byte of uint8 [128, 256] as e4m3, transposed, times bf16 [128, 64]."""
    return _multiplied(codes, x, 0, 2)


@nki.jit  # type: ignore[untyped-decorator]
def contiguous_stationary(codes: Any, x: Any) -> Any:
    """The first 128 bytes of a row as e4m3: the time to compare the stepped one with."""
    return _multiplied(codes, x, 0, 1)


def _multiplied(codes: Any, x: Any, first: int, step: int) -> Any:
    weights = nl.ndarray((P, 256), dtype=nl.uint8, buffer=nl.sbuf)
    moving = nl.ndarray((P, 64), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=weights, src=codes)
    nisa.dma_copy(dst=moving, src=x)
    total = nl.ndarray((P, 64), dtype=nl.float32, buffer=nl.psum)
    stationary = weights.view(nl.float8_e4m3)[:, first : first + P * step : step]
    nisa.nc_matmul(dst=total, stationary=stationary, moving=moving, accumulate=False)
    return stored(total, (P, 64), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def e5m2_stationary(codes: Any, x: Any) -> Any:
    """uint8 [128, 128] as e5m2, subnormals among them, transposed, times bf16 [128, 64]."""
    weights = nl.ndarray((P, P), dtype=nl.uint8, buffer=nl.sbuf)
    moving = nl.ndarray((P, 64), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=weights, src=codes)
    nisa.dma_copy(dst=moving, src=x)
    total = nl.ndarray((P, 64), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=total, stationary=weights.view(nl.float8_e5m2), moving=moving, accumulate=False)
    return stored(total, (P, 64), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def dma_between_ranks(x: Any) -> Any:
    """bf16 [4, 64, 32] in HBM into a tile [4, 2048] and back: equal counts, unlike ranks."""
    tile = nl.ndarray((4, 2048), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    out = nl.ndarray((4, 64, 32), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


@nki.jit  # type: ignore[untyped-decorator]
def dma_of_permuted_tiles(x: Any) -> Any:
    """uint8 [3, 128, 64] in HBM into [128, 3, 64], as spans of a weight are loaded."""
    tile = nl.ndarray((P, 3, 64), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x.permute((1, 0, 2)))
    out = nl.ndarray((P, 3, 64), dtype=nl.uint8, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


@nki.jit  # type: ignore[untyped-decorator]
def engines_write_psum(x: Any) -> Any:
    """VectorE and ScalarE write a PSUM tile that VectorE reads, as weighted sums do."""
    tile = nl.ndarray((P, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    bank = nl.ndarray((P, 2, 64), dtype=nl.float32, buffer=nl.psum)
    nisa.tensor_scalar(dst=bank[:, 0, :], data=tile, op0=nl.multiply, operand0=2.0)
    nisa.activation(dst=bank[:, 1, :], op=nl.copy, data=tile, scale=3.0)
    total = nl.ndarray((P, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=total, src=bank[:, 0, :])
    nisa.tensor_tensor(dst=total, data1=bank[:, 1, :], data2=total, op=nl.add)
    return stored(total, (P, 64), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def fp8_view_in_sbuf(codes: Any) -> Any:
    """uint8 codes of e4m3, subnormals among them, times 2.0 by ScalarE, to fp32."""
    tile = nl.ndarray((P, 256), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=codes)
    wide = nl.ndarray((P, 256), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=wide, op=nl.copy, data=tile.view(nl.float8_e4m3), scale=2.0)
    return stored(wide, (P, 256), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def int32_in_psum(x: Any) -> Any:
    """int32 copied into PSUM, shifted there, and copied out."""
    tile = nl.ndarray((P, 64), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    bank = nl.ndarray((P, 64), dtype=nl.int32, buffer=nl.psum)
    nisa.tensor_copy(dst=bank, src=tile, engine=nisa.engine.vector)
    nisa.tensor_scalar(dst=tile, data=bank, op0=nl.left_shift, operand0=3)
    return stored(tile, (P, 64), nl.int32)


@nki.jit  # type: ignore[untyped-decorator]
def masks_with_the_top_bit(x: Any) -> Any:
    """(word << 1) & 0x8E8E8E8E on VectorE: an immediate with its top bit set."""
    tile = nl.ndarray((P, 64), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.left_shift, operand0=1, op1=nl.bitwise_and, operand1=TOP_BIT_MASK)
    return stored(tile, (P, 64), nl.int32)


@nki.jit  # type: ignore[untyped-decorator]
def half_of_signed_bytes(x: Any) -> Any:
    """int8 / 2 - 1/4 on ScalarE, rounded to nearest: an arithmetic shift right."""
    tile = nl.ndarray((P, 256), dtype=nl.int8, buffer=nl.sbuf)
    down = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x)
    nisa.memset(dst=down, value=-0.25)
    halves = nl.ndarray((P, 256), dtype=nl.int8, buffer=nl.sbuf)
    nisa.activation(dst=halves, op=nl.copy, data=tile, scale=0.5, bias=down)
    return stored(halves, (P, 256), nl.int8)


@nki.jit  # type: ignore[untyped-decorator]
def loop_of_no_trip(x: Any, flag: Any) -> Any:
    """Zeros, overwritten with x in a loop whose trip count is the flag: order of DMAs, and tiles of a loop's body."""
    out = nl.ndarray((P, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    zeros = nl.ndarray((P, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=zeros, value=0.0)
    nisa.dma_copy(dst=out, src=zeros)
    trips = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=trips, src=flag)
    register = nisa.register_alloc()
    nisa.register_load(register, trips)

    def once(_index: Any) -> None:
        tile = nl.ndarray((P, 64), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x)
        nisa.dma_copy(dst=out, src=tile)

    nl.fori_loop(0, register, once)
    return out


@nki.jit  # type: ignore[untyped-decorator]
def bf16_out_of_psum_on_scalar(x: Any) -> Any:
    """bf16 [128, 64] through TensorE's transpose, copied out of PSUM by ScalarE: NaN and all."""
    tile = loaded(x)
    bank = nl.ndarray((64, P), dtype=nl.bfloat16, buffer=nl.psum)
    nisa.nc_transpose(dst=bank, data=tile)
    copied = nl.ndarray((64, P), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_copy(dst=copied, src=bank, engine=nisa.engine.scalar)
    return stored(copied, (64, P), nl.bfloat16)


@nki.jit  # type: ignore[untyped-decorator]
def scaled_on_scalar(x: Any, factors: Any) -> Any:
    """tensor_scalar of bf16 [128, 64] by fp32 [128, 1] on ScalarE, every second element of it."""
    tile = loaded(x)
    factor = loaded(factors)
    y = nl.ndarray((P, 32), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=y, data=tile[:, 0:64:2], op0=nl.multiply, operand0=factor, engine=nisa.engine.scalar)
    return stored(y, (P, 32), nl.bfloat16)


@nki.jit  # type: ignore[untyped-decorator]
def exponent_bytes(codes: Any) -> Any:
    """uint8 [128, 256] to int32 on ScalarE, shifted to an fp32 exponent: 2^(b - 127), and 0.0 for byte 0."""
    tile = loaded(codes)
    bits = nl.ndarray((P, 256), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=bits, src=tile, engine=nisa.engine.scalar)
    nisa.tensor_scalar(dst=bits, data=bits, op0=nl.left_shift, operand0=23)
    return stored(bits.view(nl.float32), (P, 256), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def words_joined(a: Any, b: Any) -> Any:
    """Bitwise or of two int32 [128, 64] on VectorE."""
    left = loaded(a)
    right = loaded(b)
    nisa.tensor_tensor(dst=left, data1=left, data2=right, op=nl.bitwise_or)
    return stored(left, (P, 64), nl.int32)


@nki.jit  # type: ignore[untyped-decorator]
def rounded_to_e4m3(x: Any, inverse: Any) -> Any:
    """bf16 [128, 64] times fp32 [128, 64], rounded to e4m3 by VectorE to nearest even, and widened again."""
    tile = loaded(x)
    factors = loaded(inverse)
    codes = nl.ndarray((P, 64), dtype=nl.float8_e4m3, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=codes, data1=tile, data2=factors, op=nl.multiply)
    wide = nl.ndarray((P, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=wide, data1=codes, data2=factors, op=nl.multiply)
    return stored(wide, (P, 64), nl.float32)


def gemm_probes() -> tuple[Probe, ...]:
    """With arguments whose sums are exact."""
    generator = torch.Generator().manual_seed(0)
    small = torch.tensor([0x00, 0x38, 0xB8, 0x40, 0x04], dtype=torch.uint8)
    codes = small[torch.randint(5, (P, 256), generator=generator)]
    x = torch.randint(-3, 4, (P, 64), generator=generator).bfloat16()
    values = codes.view(torch.float8_e4m3fn).float()
    fives = torch.tensor([0x00, 0x02, 0x04, 0x8C], dtype=torch.uint8)[torch.randint(4, (P, P), generator=generator)]
    words = torch.randint(-(2**31), 2**31 - 1, (P, 64), generator=generator, dtype=torch.int32)
    little = words & 0xFFFF
    floats = torch.randint(-9, 9, (P, 64), generator=generator).float()
    every = torch.arange(256, dtype=torch.uint8).repeat(P, 1)
    finite = every & 0xF7
    rows = torch.randint(-9, 9, (4, 64, 32), generator=generator).bfloat16()
    tiles = torch.randint(256, (3, P, 64), generator=generator, dtype=torch.uint8)
    zero, one = (torch.tensor([[flag]], dtype=torch.int32) for flag in (0, 1))
    special = x.clone()
    special[0, :3] = torch.tensor([float("nan"), float("-inf"), -0.0]).bfloat16()
    factors = torch.exp2(torch.randint(-9, 9, (P, 1), generator=generator).float())
    powers = torch.exp2(torch.arange(256).double() - 127).float()
    powers[0], powers[255] = 0.0, float("inf")
    fine = (torch.randn((P, 64), generator=generator).clamp(-3, 3) * 70).bfloat16()
    fine[0, :4] = torch.tensor([17.0, 19.0, 2.0**-10, 3 * 2.0**-10]).bfloat16()  # halfway between two codes
    ones = torch.ones((P, 64))
    retreat = "use `convert --layout kernel`, whose stationaries are contiguous"
    return (
        Probe(
            contiguous_stationary, (codes, x), values[:, :P].T @ x.float(), "no fp8 GEMM kernel works: turn them off"
        ),
        Probe(stepped_stationary, (codes, x), values[:, ::2].T @ x.float(), retreat),
        Probe(
            e5m2_stationary, (fives, x), fives.view(torch.float8_e5m2).float().T @ x.float(), "use the stored layout"
        ),
        Probe(dma_between_ranks, (rows,), rows, "reshape the HBM side, or a DMA for each row"),
        Probe(dma_of_permuted_tiles, (tiles,), tiles.permute(1, 0, 2).contiguous(), "a DMA for each k tile"),
        Probe(engines_write_psum, (floats,), 5 * floats, "sum in SBUF, at twice the cycles"),
        Probe(
            fp8_view_in_sbuf,
            (finite,),
            2 * (finite).view(torch.float8_e4m3fn).float(),
            "widen with a matmul by identity",
        ),
        Probe(int32_in_psum, (little,), little << 3, "none of the kernels needs it: bit work is in SBUF"),
        Probe(masks_with_the_top_bit, (words,), (words << 1) & TOP_BIT_MASK, "a [128, 1] tile as operand"),
        Probe(
            half_of_signed_bytes, (every.view(torch.int8),), every.view(torch.int8) >> 1, "VectorE's bitwise operators"
        ),
        Probe(bf16_out_of_psum_on_scalar, (special,), special.T.contiguous(), "VectorE copies, in engine_balance"),
        Probe(scaled_on_scalar, (x, factors), (x[:, ::2].float() * factors).bfloat16(), "activation with copy"),
        Probe(exponent_bytes, (every,), powers.repeat(P, 1), "the copy on VectorE"),
        Probe(words_joined, (words, words.flip(0)), words | words.flip(0), "add: no bit is in both"),
        Probe(rounded_to_e4m3, (fine, ones), fine.to(torch.float8_e4m3fn).float(), "the GEMMs without round trip"),
        Probe(loop_of_no_trip, (floats, zero), torch.zeros_like(floats), "no gated kernels: linear_qdq instead"),
        Probe(loop_of_no_trip, (floats, one), floats, "no gated kernels: linear_qdq instead"),
    )
