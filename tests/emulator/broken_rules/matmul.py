"""Matmuls, transposes and shuffles."""

from __future__ import annotations

from nki_emulator import isa as nisa
from nki_emulator import language as nl
from nki_emulator import rules
from nki_emulator.isa import engine

from tests.emulator.broken_rules import breaks
from tests.emulator.support import P, empty, tile


@breaks(rules.MATMUL_SHAPE, "nc_matmul", "dst")
def unequal_contraction() -> None:
    out = empty((4, 4), buffer=nl.psum)
    nisa.nc_matmul(dst=out, stationary=tile((8, 4)), moving=tile((16, 4)))


@breaks(rules.MATMUL_SHAPE, "nc_matmul", "dst")
def too_many_moving_columns() -> None:
    out = empty((4, 1024), buffer=nl.psum)
    nisa.nc_matmul(dst=out[:, 0:513], stationary=tile((4, 4)), moving=tile((4, 513)))


@breaks(rules.MATMUL_SHAPE, "nc_matmul", "stationary")
def stationary_of_three_dimensions() -> None:
    out = empty((4, 4), buffer=nl.psum)
    nisa.nc_matmul(dst=out, stationary=tile((4, 2, 2)), moving=tile((4, 4)))


@breaks(rules.MATMUL_SHAPE, "nc_matmul", "moving")
def operands_at_different_partitions() -> None:
    out = empty((4, 4), buffer=nl.psum)
    nisa.nc_matmul(dst=out, stationary=tile((P, 4))[0:32, :], moving=tile((P, 4))[32:64, :])


@breaks(rules.MATMUL_DTYPE, "nc_matmul", "moving")
def fp32_with_bf16() -> None:
    out = empty((4, 4), buffer=nl.psum)
    nisa.nc_matmul(dst=out, stationary=tile((4, 4)), moving=tile((4, 4), nl.bfloat16))


@breaks(rules.MATMUL_DTYPE, "nc_matmul", "stationary")
def integer_matmul() -> None:
    out = empty((4, 4), buffer=nl.psum)
    nisa.nc_matmul(dst=out, stationary=tile((4, 4), nl.uint8), moving=tile((4, 4), nl.bfloat16))


@breaks(rules.MATMUL_DTYPE, "nc_matmul", "dst")
def bf16_result() -> None:
    out = empty((4, 4), nl.bfloat16, nl.psum)
    nisa.nc_matmul(dst=out, stationary=tile((4, 4)), moving=tile((4, 4)))


@breaks(rules.MATMUL_ACCUMULATE, "nc_matmul", "dst")
def accumulate_on_nothing() -> None:
    out = empty((4, 4), buffer=nl.psum)
    nisa.nc_matmul(dst=out, stationary=tile((4, 4)), moving=tile((4, 4)), accumulate=True)


@breaks(rules.MATMUL_ACCUMULATE, "nc_matmul", "dst")
def accumulate_on_a_memset() -> None:
    out = tile((4, 4), buffer=nl.psum, value=0.0)
    nisa.nc_matmul(dst=out, stationary=tile((4, 4)), moving=tile((4, 4)), accumulate=True)


@breaks(rules.MATMUL_ACCUMULATE, "nc_matmul", "dst")
def undecided_accumulate_on_ones() -> None:
    out = tile((4, 4), buffer=nl.psum, value=1.0)
    nisa.nc_matmul(dst=out, stationary=tile((4, 4)), moving=tile((4, 4)))


@breaks(rules.MATMUL_ACCUMULATE, "nc_matmul", "dst")
def undecided_accumulate_on_half_a_tile() -> None:
    out = empty((4, 8), buffer=nl.psum)
    nisa.nc_matmul(dst=out[:, 0:4], stationary=tile((4, 4)), moving=tile((4, 4)))
    nisa.nc_matmul(dst=out, stationary=tile((4, 4)), moving=tile((4, 8)))


@breaks(rules.MATMUL_TILING, "nc_matmul", "tile_size")
def tile_size_without_position() -> None:
    out = empty((4, 4), buffer=nl.psum)
    nisa.nc_matmul(dst=out, stationary=tile((32, 4)), moving=tile((32, 4)), tile_size=(32, 128))


@breaks(rules.MATMUL_TILING, "nc_matmul", "stationary")
def row_tile_elsewhere() -> None:
    out, t = empty((4, 4), buffer=nl.psum), tile((32, 4))
    nisa.nc_matmul(dst=out, stationary=t, moving=t, tile_position=(32, 0), tile_size=(32, 128))


@breaks(rules.MATMUL_DOUBLE_ROW, "nc_matmul", "stationary")
def double_row_of_bf16() -> None:
    out, t = empty((4, 4), buffer=nl.psum), tile((P, 2, 4), nl.bfloat16)
    nisa.nc_matmul(dst=out, stationary=t, moving=t, perf_mode=nisa.matmul_perf_mode.double_row)


@breaks(rules.TRANSPOSE, "nc_transpose", "dst")
def transpose_with_a_cast() -> None:
    nisa.nc_transpose(dst=empty((4, P), buffer=nl.psum), data=tile((P, 4), nl.bfloat16))


@breaks(rules.TRANSPOSE, "nc_transpose", "data")
def wide_transpose() -> None:
    nisa.nc_transpose(dst=empty((P, 4), buffer=nl.psum), data=tile((4, P)), engine=engine.vector)


@breaks(rules.TRANSPOSE, "nc_matmul", "moving")
def transpose_without_an_identity() -> None:
    out, t = empty((4, 4), buffer=nl.psum), tile((4, 4))
    nisa.nc_matmul(dst=out, stationary=t, moving=t, is_transpose=True)


@breaks(rules.FP8_TRANSPOSE, "nc_transpose", "dst")
def packed_fp8_transpose() -> None:
    codes = tile((P, 4), nl.uint8).view(nl.float8_e4m3)
    nisa.nc_transpose(dst=empty((4, P), nl.float8_e4m3, nl.psum), data=codes)


@breaks(rules.SHUFFLE_MASK, "nc_stream_shuffle", "shuffle_mask")
def short_mask() -> None:
    nisa.nc_stream_shuffle(dst=empty((32, 4)), src=tile((32, 4)), shuffle_mask=[0] * 31)


@breaks(rules.SHUFFLE_MASK, "nc_stream_shuffle", "shuffle_mask")
def mask_beyond_the_quadrant() -> None:
    nisa.nc_stream_shuffle(dst=empty((32, 4)), src=tile((32, 4)), shuffle_mask=[32] * 32)


@breaks(rules.FP8_TRANSPOSE, "nc_matmul", "dst")
def packed_fp8_transpose_by_matmul() -> None:
    codes = tile((P, 4), nl.uint8).view(nl.float8_e4m3)
    out, identity = empty((4, P), nl.float8_e4m3, nl.psum), nl.shared_identity_matrix(P, dtype=nl.bfloat16)
    nisa.nc_matmul(dst=out, stationary=codes, moving=identity, is_transpose=True)


@breaks(rules.MATMUL_ONEZERO, "nc_matmul", "moving")
def wrong_onezero_hint() -> None:
    out, t = empty((4, 4), buffer=nl.psum), tile((4, 4), value=2.0)
    nisa.nc_matmul(dst=out, stationary=t, moving=t, is_moving_onezero=True)


@breaks(rules.SHUFFLE_MASK, "nc_stream_shuffle", "shuffle_mask")
def mask_beyond_the_partitions() -> None:
    nisa.nc_stream_shuffle(dst=empty((16, 4)), src=tile((16, 4)), shuffle_mask=[20] * 32)


@breaks(rules.ENUMS, "nc_matmul", "perf_mode")
def perf_mode_as_string() -> None:
    out, t = empty((4, 4), buffer=nl.psum), tile((4, 4))
    nisa.nc_matmul(dst=out, stationary=t, moving=t, perf_mode="double_row")


@breaks(rules.MATMUL_DOUBLE_ROW, "nc_matmul", "perf_mode")
def tiled_double_row() -> None:
    out, codes = empty((4, 4), buffer=nl.psum), tile((P, 2, 4), nl.uint8).view(nl.float8_e4m3)
    mode = nisa.matmul_perf_mode.double_row
    nisa.nc_matmul(dst=out, stationary=codes, moving=codes, perf_mode=mode, tile_position=(0, 0), tile_size=(128, 128))


@breaks(rules.MATMUL_TILING, "nc_matmul", "tile_position")
def tile_position_between_tiles() -> None:
    out, t = empty((4, 4), buffer=nl.psum), tile((32, 4))
    nisa.nc_matmul(dst=out, stationary=t, moving=t, tile_position=(16, 0), tile_size=(32, 128))


@breaks(rules.MATMUL_TILING, "nc_matmul", "dst")
def column_tile_into_other_partitions() -> None:
    out, t = empty((4, 4), buffer=nl.psum), tile((P, 4))
    nisa.nc_matmul(dst=out, stationary=t, moving=t, tile_position=(0, 32), tile_size=(128, 32))


@breaks(rules.OPERAND_KIND, "nc_matmul", "accumulate")
def accumulate_as_string() -> None:
    out, t = empty((4, 4), buffer=nl.psum), tile((4, 4))
    nisa.nc_matmul(dst=out, stationary=t, moving=t, accumulate="no")


@breaks(rules.TRANSPOSE, "nc_transpose", "data")
def tensor_engine_transpose_into_sbuf() -> None:
    nisa.nc_transpose(dst=empty((P, 64)), data=tile((64, P)))
