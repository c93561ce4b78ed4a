"""Probes of the norm, SwiGLU, hyper-connection and expert kernels."""

from __future__ import annotations

from typing import Any

import torch
from nki_emulator import installed

from probe_kernels.forms import P, Probe, loaded, stored

with installed():
    import nki
    import nki.isa as nisa
    import nki.language as nl


@nki.jit  # type: ignore[untyped-decorator]
def rsqrt_of_small_numbers(x: Any) -> Any:
    """GpSimd's rsqrt of fp32 [128, 8] down to 1e-20."""
    tile = loaded(x)
    y = nl.ndarray((P, 8), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=y, data=tile, op0=nl.rsqrt, operand0=0.0)
    return stored(y, (P, 8), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def output_written_over(x: Any) -> Any:
    """Sums of squares of bf16 [128, 64] whose squares are written where x times 2 is written next: both."""
    tile = loaded(x)
    y = nl.ndarray((P, 64), dtype=nl.bfloat16, buffer=nl.sbuf)
    total = nl.ndarray((P, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation_reduce(dst=y, op=nl.square, data=tile, reduce_op=nl.add, reduce_res=total)
    nisa.scalar_tensor_tensor(dst=y, data=tile, op0=nl.multiply, operand0=total, op1=nl.multiply, operand1=tile)
    return stored(y, (P, 64), nl.bfloat16)


@nki.jit  # type: ignore[untyped-decorator]
def silu_of_gates(x: Any) -> Any:
    """ScalarE's silu of fp32 [128, 64]."""
    tile = loaded(x)
    y = nl.ndarray((P, 64), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=y, op=nl.silu, data=tile)
    return stored(y, (P, 64), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def fp8_on_vector(codes: Any) -> Any:
    """uint8 codes of e4m3 [128, 256], subnormals among them, widened by VectorE."""
    tile = loaded(codes)
    wide = nl.ndarray((P, 256), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=wide, src=tile.view(nl.float8_e4m3), engine=nisa.engine.vector)
    return stored(wide, (P, 256), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def dma_of_pieces(x: Any) -> Any:
    """Half of the columns of bf16 [16, 1024], a row on 4 partitions, and back: [16, 4, 128] into [64, 128]."""
    tile = nl.ndarray((64, P), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x[:, 0:512].reshape_dim(1, (4, P)))
    out = nl.ndarray((16, 512), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out.reshape_dim(1, (4, P)), src=tile)
    return out


@nki.jit  # type: ignore[untyped-decorator]
def dma_of_repeated_rows(x: Any) -> Any:
    """Each row of uint8 [4, 64] on 32 partitions: [4, 32, 64], with stride 0, into [128, 64]."""
    tile = nl.ndarray((P, 64), dtype=nl.uint8, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=x.expand_dim(1).broadcast(1, 32))
    return stored(tile, (P, 64), nl.uint8)


@nki.jit  # type: ignore[untyped-decorator]
def short_writes(x: Any) -> Any:
    """fp32 [128, 4] from SBUF to HBM: runs of 16 bytes."""
    return stored(loaded(x), (P, 4), nl.float32)


@nki.jit  # type: ignore[untyped-decorator]
def barrier_after_a_loop_of_no_trip(x: Any, flag: Any) -> Any:
    """Two cores: each writes half, then a loop whose trip count is the flag, a barrier, and each copies the other's."""
    half = nl.ndarray((2, 64, 32), dtype=nl.float32, buffer=nl.shared_hbm, name="halves")
    out = nl.ndarray((2, 64, 32), dtype=nl.float32, buffer=nl.shared_hbm)
    mine = nl.program_id(0)
    nisa.dma_copy(dst=half[mine], src=loaded(x[mine]))
    trips = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=trips, src=flag)
    register = nisa.register_alloc()
    nisa.register_load(register, trips)

    def once(_index: Any) -> None:
        tile = nl.ndarray((64, 32), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=tile, value=0.0)
        nisa.dma_copy(dst=half[mine], src=tile)

    nl.fori_loop(0, register, once)
    nisa.core_barrier(half, (0, 1))
    nisa.dma_copy(dst=out[1 - mine], src=loaded(half[1 - mine]))
    return out


def norm_and_stream_probes() -> tuple[Probe, ...]:
    """What docs/kernels.md and docs/fused_kernels.md leave to a device, GEMMs apart."""
    generator = torch.Generator().manual_seed(4)
    squares = torch.tensor([1e-20, 3e-20, 1e-10, 0.25, 1.0, 4.0, 1e10, 1e20]).repeat(P, 1)
    small = torch.randint(-2, 3, (P, 64), generator=generator).bfloat16()
    total = small.float().square().sum(dim=1, keepdim=True)
    gates = torch.linspace(-20, 10, P * 64).reshape(P, 64)
    finite = torch.arange(256, dtype=torch.uint8).repeat(P, 1) & 0xF7
    rows = torch.randn((16, 1024), generator=generator).bfloat16()
    scales = torch.randint(256, (4, 64), generator=generator, dtype=torch.uint8)
    halves = torch.randn((2, 64, 32), generator=generator)
    zero, one = (torch.tensor([[flag]], dtype=torch.int32) for flag in (0, 1))
    norm_instead = "the norm in torch: DEEPINFER_NEURON_NKI_NORM=0"
    barrier_instead = "linear_qdq three times instead of an expert kernel"
    return (
        Probe(rsqrt_of_small_numbers, (squares,), squares.double().rsqrt().float(), norm_instead, tolerance=2.0**-18),
        Probe(output_written_over, (small,), (small.float() * total * small.float()).bfloat16(), norm_instead),
        Probe(
            silu_of_gates, (gates,), torch.nn.functional.silu(gates.double()).float(), norm_instead, tolerance=2.0**-16
        ),
        Probe(fp8_on_vector, (finite,), finite.view(torch.float8_e4m3fn).float(), "widen on ScalarE"),
        Probe(dma_of_pieces, (rows,), rows[:, :512].contiguous(), "one core, or a DMA for each piece"),
        Probe(dma_of_repeated_rows, (scales,), scales.repeat_interleave(32, dim=0), "`convert --layout kernel`"),
        Probe(short_writes, (squares[:, :4].contiguous(),), squares[:, :4], "the mixes in torch"),
        Probe(barrier_after_a_loop_of_no_trip, (halves, zero), halves, barrier_instead, grid=2),
        Probe(barrier_after_a_loop_of_no_trip, (halves, one), torch.zeros_like(halves), barrier_instead, grid=2),
    )
