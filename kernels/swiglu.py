"""SwiGLU: the activation between an expert's two projections."""

import nki
import nki.isa as nisa
import nki.language as nl

from .constants import SWIGLU_LIMIT
from .hc_layout import load_coefficients, row_segments, token_tiles
from .records import my_share


@nki.jit
def kernel(gate: nl.ndarray, up: nl.ndarray) -> nl.ndarray:
    """silu(min(gate, limit)) * clamp(up, limit): gate and up bf16 [t, h] -> bf16 [t, h], in fp32. Grid 1 or 2."""
    tokens, columns = gate.shape
    out = nl.ndarray((tokens, columns), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    share = my_share(columns)
    mine = nl.ds(share.first, share.size)
    for tile in token_tiles(tokens):
        rows = nl.ds(tile.first, tile.rows)
        _activate(out[rows, mine], gate[rows, mine], up[rows, mine])
    return out


def activate_weighted(out: nl.ndarray, gate: nl.ndarray, up: nl.ndarray, weight: nl.ndarray) -> None:
    """One tile of tokens: out = SwiGLU of gate and up, bf16 [rows, columns] in HBM, times weight fp32 [rows, 1]."""
    g, u = _load_limited(gate, up)
    factors = load_coefficients(weight, g.shape[0] // out.shape[0])
    wide = nl.ndarray(g.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=wide, op=nl.silu, data=g)
    nisa.scalar_tensor_tensor(dst=u, data=wide, op0=nl.multiply, operand0=factors, op1=nl.multiply, operand1=u)
    _store(out, u)


def _activate(out: nl.ndarray, gate: nl.ndarray, up: nl.ndarray) -> None:
    """One tile of tokens."""
    g, u = _load_limited(gate, up)
    wide = nl.ndarray(g.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=wide, op=nl.silu, data=g)
    nisa.tensor_tensor(dst=u, data1=wide, data2=u, op=nl.multiply)
    _store(out, u)


def _load_limited(gate: nl.ndarray, up: nl.ndarray) -> tuple[nl.ndarray, nl.ndarray]:
    """gate and up in SBUF, folded and within the limit."""
    g = _load(gate)
    u = _load(up)
    nisa.tensor_scalar(dst=g, data=g, op0=nl.minimum, operand0=SWIGLU_LIMIT)
    nisa.tensor_scalar(dst=u, data=u, op0=nl.minimum, operand0=SWIGLU_LIMIT, op1=nl.maximum, operand1=-SWIGLU_LIMIT)
    return g, u


def _load(src: nl.ndarray) -> nl.ndarray:
    """bf16 [rows, columns] in HBM, folded onto as many partitions as there is room for."""
    rows, columns = src.shape
    segments = row_segments(columns, rows)
    width = columns // segments
    tile = nl.ndarray((rows * segments, width), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=src.reshape_dim(1, (segments, width)))
    return tile


def _store(out: nl.ndarray, y: nl.ndarray) -> None:
    segments = y.shape[0] // out.shape[0]
    nisa.dma_copy(dst=out.reshape_dim(1, (segments, y.shape[1])), src=y)
