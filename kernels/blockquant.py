"""GEMM kernels on block-quantized weights for Trainium2 (NKI 0.6).

fp8 codes, fp4 codes and e8m0 scales cross the framework boundary as uint8; e4m3 codes are at most 0x77 (sign aside),
as `deepinfer-prep convert` writes them. Each `_2core` kernel is a function of its own because frameworks cache compiled
kernels by function, not by grid: launch it with grid 2, the others with grid 1.
"""

import nki
import nki.language as nl

from .gate import fill_zero, trips_if_one
from .gemm_block128 import linear_block128
from .gemm_fp4 import linear_fp4
from .gemm_fp8 import linear_fp8
from .kmajor_block128 import linear_block128_kmajor
from .kmajor_fp4 import linear_fp4_kmajor
from .kmajor_fp8 import linear_fp8_kmajor


@nki.jit
def fp8_linear_raw(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """x bf16 [m, k] times w^T, w uint8 [n, k] (e4m3) with scale uint8 [ceil(n/32), ceil(k/32)] (e8m0): bf16 [m, n]."""
    out = nl.ndarray((x.shape[0], w.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    linear_fp8(out, x, w, scale, False)
    return out


@nki.jit
def fp8_linear_raw_2core(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """`fp8_linear_raw` on two cores, n a multiple of 256."""
    out = nl.ndarray((x.shape[0], w.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    linear_fp8(out, x, w, scale, False)
    return out


@nki.jit
def fp8_linear(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """`fp8_linear_raw` of x after a round trip through e4m3 in blocks of 32 columns."""
    out = nl.ndarray((x.shape[0], w.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    linear_fp8(out, x, w, scale, True)
    return out


@nki.jit
def fp8_linear_2core(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """`fp8_linear` on two cores, n a multiple of 256."""
    out = nl.ndarray((x.shape[0], w.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    linear_fp8(out, x, w, scale, True)
    return out


@nki.jit
def fp8_linear_block128(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """x bf16 [m, k] times w^T, w uint8 [n, k] (e4m3) with scale fp32 [ceil(n/128), ceil(k/128)]: bf16 [m, n]."""
    return linear_block128(x, w, scale)


@nki.jit
def fp8_linear_block128_2core(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """`fp8_linear_block128` on two cores, n a multiple of 256."""
    return linear_block128(x, w, scale)


@nki.jit
def fp4_linear_raw(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """x bf16 [m, k] times w^T, w uint8 [n, k/2] (two e2m1 codes a byte), scale uint8 [n, k/32] (e8m0): bf16 [m, n]."""
    out = nl.ndarray((x.shape[0], w.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    linear_fp4(out, x, w, scale, False)
    return out


@nki.jit
def fp4_linear_raw_2core(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """`fp4_linear_raw` on two cores, n a multiple of 256."""
    out = nl.ndarray((x.shape[0], w.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    linear_fp4(out, x, w, scale, False)
    return out


@nki.jit
def fp4_linear(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """`fp4_linear_raw` of x after a round trip through e4m3 in blocks of 32 columns."""
    out = nl.ndarray((x.shape[0], w.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    linear_fp4(out, x, w, scale, True)
    return out


@nki.jit
def fp4_linear_2core(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """`fp4_linear` on two cores, n a multiple of 256."""
    out = nl.ndarray((x.shape[0], w.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    linear_fp4(out, x, w, scale, True)
    return out


@nki.jit
def fp4_linear_2core_gated(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray, flag: nl.ndarray) -> nl.ndarray:
    """`fp4_linear_2core` where flag int32 [1, 1] is 1; otherwise zeros, and no weight is read."""
    out = nl.ndarray((x.shape[0], w.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    fill_zero(out)

    def once(_index: nl.ndarray) -> None:
        linear_fp4(out, x, w, scale, True)

    nl.fori_loop(0, trips_if_one(flag), once)
    return out


@nki.jit
def fp8_linear_raw_kmajor(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """`fp8_linear_raw` of a weight in the kernel layout."""
    out = nl.ndarray((x.shape[0], w.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    linear_fp8_kmajor(out, x, w, scale, False)
    return out


@nki.jit
def fp8_linear_raw_kmajor_2core(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """`fp8_linear_raw_kmajor` on two cores, n a multiple of 256."""
    out = nl.ndarray((x.shape[0], w.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    linear_fp8_kmajor(out, x, w, scale, False)
    return out


@nki.jit
def fp8_linear_kmajor(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """`fp8_linear` of a weight in the kernel layout."""
    out = nl.ndarray((x.shape[0], w.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    linear_fp8_kmajor(out, x, w, scale, True)
    return out


@nki.jit
def fp8_linear_kmajor_2core(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """`fp8_linear_kmajor` on two cores, n a multiple of 256."""
    out = nl.ndarray((x.shape[0], w.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    linear_fp8_kmajor(out, x, w, scale, True)
    return out


@nki.jit
def fp8_linear_block128_kmajor(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """`fp8_linear_block128` of a weight in the kernel layout."""
    return linear_block128_kmajor(x, w, scale)


@nki.jit
def fp8_linear_block128_kmajor_2core(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """`fp8_linear_block128_kmajor` on two cores, n a multiple of 256."""
    return linear_block128_kmajor(x, w, scale)


@nki.jit
def fp4_linear_raw_kmajor(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """`fp4_linear_raw` of a weight in the kernel layout."""
    out = nl.ndarray((x.shape[0], w.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    linear_fp4_kmajor(out, x, w, scale, False)
    return out


@nki.jit
def fp4_linear_raw_kmajor_2core(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """`fp4_linear_raw_kmajor` on two cores, n a multiple of 256."""
    out = nl.ndarray((x.shape[0], w.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    linear_fp4_kmajor(out, x, w, scale, False)
    return out


@nki.jit
def fp4_linear_kmajor(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """`fp4_linear` of a weight in the kernel layout."""
    out = nl.ndarray((x.shape[0], w.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    linear_fp4_kmajor(out, x, w, scale, True)
    return out


@nki.jit
def fp4_linear_kmajor_2core(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray) -> nl.ndarray:
    """`fp4_linear_kmajor` on two cores, n a multiple of 256."""
    out = nl.ndarray((x.shape[0], w.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    linear_fp4_kmajor(out, x, w, scale, True)
    return out


@nki.jit
def fp4_linear_kmajor_2core_gated(x: nl.ndarray, w: nl.ndarray, scale: nl.ndarray, flag: nl.ndarray) -> nl.ndarray:
    """`fp4_linear_2core_gated` of a weight in the kernel layout."""
    out = nl.ndarray((x.shape[0], w.shape[0]), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    fill_zero(out)

    def once(_index: nl.ndarray) -> None:
        linear_fp4_kmajor(out, x, w, scale, True)

    nl.fori_loop(0, trips_if_one(flag), once)
    return out
