"""Hyper-connection mixes: how much of each residual stream goes into a layer, out of it, and on to the next."""

import nki
import nki.isa as nisa
import nki.language as nl

from .constants import HC, HC_EPS, NORM_EPS, SINKHORN_ITERS
from .load_x import FOLD_WIDTH, load_activations
from .records import Share, TokenBatch, my_share
from .tile_pool import P, TilePool, new_pool
from .tiles import k_tiles, plane_view

LOGITS = (2 + HC) * HC
PLANES = 2

BATCH = 4
"""Token tiles whose small matrices are worked on together: 4 x 16 elements fill VectorE's shortest instruction."""


@nki.jit
def kernel(
    residual: nl.ndarray, fn_hi: nl.ndarray, fn_lo: nl.ndarray, scale: nl.ndarray, base: nl.ndarray
) -> tuple[nl.ndarray, nl.ndarray, nl.ndarray]:
    """pre fp32 [t, HC], post fp32 [t, HC], comb fp32 [t, HC, HC]; a grid of 2 halves the tokens.

    residual bf16 [t, HC, h] with HC * h a multiple of 128, fn_hi and fn_lo bf16 [24, HC * h] (their sum is the fp32
    matrix), scale fp32 [3], base fp32 [24].
    """
    tokens, streams, columns = residual.shape
    assert streams == HC, f"residual has {streams} streams, must be {HC}"
    assert streams * columns % P == 0, f"a token has {streams * columns} values, must be a multiple of {P}"
    pre = nl.ndarray((tokens, HC), dtype=nl.float32, buffer=nl.shared_hbm)
    post = nl.ndarray((tokens, HC), dtype=nl.float32, buffer=nl.shared_hbm)
    comb = nl.ndarray((tokens, HC, HC), dtype=nl.float32, buffer=nl.shared_hbm)
    share = my_share(tokens)
    flat = residual.reshape((tokens, streams * columns))
    pool = new_pool()
    identity = nl.shared_identity_matrix(P, dtype=nl.uint8)
    fn = plane_view(load_activations(pool, [fn_hi, fn_lo], FOLD_WIDTH, False))
    adjust = _load_adjustment(scale, base)
    for batch in _batches(share):
        mine = nl.ds(batch.first, batch.end - batch.first)
        logits = _logits(pool, flat[mine, :], fn, adjust, identity, batch.rows)
        _store_gates(pre[mine, :], logits[:, :, 0:HC], 1.0, HC_EPS)
        _store_gates(post[mine, :], logits[:, :, HC : 2 * HC], 2.0, 0.0)
        _store_comb(comb[mine], logits[:, :, 2 * HC : LOGITS])
    return pre, post, comb


def _batches(share: Share) -> list[TokenBatch]:
    """This program's tokens: whole tiles by fours, then what is left as one."""
    batches = []
    full = share.size // P
    for tile in range(0, full, BATCH):
        tiles = min(BATCH, full - tile)
        first = share.first + tile * P
        batches.append(TokenBatch(first, first + tiles * P, tiles, P))
    if share.size % P != 0:
        batches.append(TokenBatch(share.end - share.size % P, share.end, 1, share.size % P))
    return batches


def _load_adjustment(scale: nl.ndarray, base: nl.ndarray) -> list[nl.ndarray]:
    """Factors and offsets of the 24 logits on every partition: two fp32 [128, 24] tiles."""
    scales = nl.ndarray((P, 3), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=scales, src=scale.expand_dim(0).broadcast(0, P))
    factors = nl.ndarray((P, LOGITS), dtype=nl.float32, buffer=nl.sbuf)
    for index in range(3):
        end = LOGITS if index == 2 else (index + 1) * HC
        count = end - index * HC
        nisa.tensor_copy(dst=factors[:, index * HC : end], src=scales[:, index : index + 1].broadcast(1, count))
    offsets = nl.ndarray((P, LOGITS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=offsets, src=base.expand_dim(0).broadcast(0, P))
    return [factors, offsets]


def _logits(
    pool: TilePool, flat: nl.ndarray, fn: nl.ndarray, adjust: list[nl.ndarray], identity: nl.ndarray, rows: int
) -> nl.ndarray:
    """flat bf16 [tiles * rows, HC * h] in HBM -> fp32 [rows, tiles, 24]: projected, normalised, scaled and offset."""
    tokens, width = flat.shape
    logits = nl.ndarray((rows, tokens // rows, LOGITS), dtype=nl.float32, buffer=nl.sbuf)
    for tile in range(tokens // rows):
        moving = plane_view(load_activations(pool, [flat[tile * rows : (tile + 1) * rows, :]], FOLD_WIDTH, False))
        sums = _contract(moving, fn, width)
        inverse = _inverse_rms(sums[1], identity, width)
        raw = nl.ndarray((rows, LOGITS), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=raw, src=sums[0][:, LOGITS : 2 * LOGITS])
        nisa.tensor_tensor(dst=raw, data1=sums[0][:, 0:LOGITS], data2=raw, op=nl.add)
        nisa.scalar_tensor_tensor(
            dst=raw, data=raw, op0=nl.multiply, operand0=inverse, op1=nl.multiply, operand1=adjust[0][0:rows, :]
        )
        nisa.tensor_tensor(dst=logits[:, tile, :], data1=raw, data2=adjust[1][0:rows, :], op=nl.add)
    return logits


def _contract(moving: nl.ndarray, fn: nl.ndarray, width: int) -> list[nl.ndarray]:
    """x times both halves of fn, fp32 [rows, 48], and x times x, fp32 [rows, rows], over all columns of x, in PSUM.

    bf16 operands are exact and their products fit fp32, so the diagonal of x x^T holds the sums of squares.
    """
    rows = moving.shape[3]
    projected = nl.ndarray((rows, 2 * LOGITS), dtype=nl.float32, buffer=nl.psum)
    gram = nl.ndarray((rows, rows), dtype=nl.float32, buffer=nl.psum)
    for tile in range(k_tiles(width, FOLD_WIDTH)):
        partitions = min(P, (width - tile * FOLD_WIDTH) // PLANES)
        for plane in range(PLANES):
            x = moving[0:partitions, tile, 0, :, plane]
            follows = tile + plane > 0
            nisa.nc_matmul(dst=projected, stationary=x, moving=fn[0:partitions, tile, 0, :, plane], accumulate=follows)
            nisa.nc_matmul(dst=gram, stationary=x, moving=x, accumulate=follows)
    return [projected, gram]


def _inverse_rms(gram: nl.ndarray, identity: nl.ndarray, width: int) -> nl.ndarray:
    """1 / sqrt(mean square + NORM_EPS) of each row, fp32 [rows, 1]. GpSimd's rsqrt is the most precise one.

    The diagonal is copied by predicate rather than multiplied by an identity, so that an infinity in one token does
    not become a NaN in all others.
    """
    rows = gram.shape[0]
    diagonal = nl.ndarray((rows, rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=diagonal, value=0.0)
    nisa.tensor_copy_predicated(dst=diagonal, src=gram, predicate=identity[0:rows, 0:rows])
    inverse = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=inverse, op=nl.add, data=diagonal, axis=1)
    nisa.tensor_scalar(dst=inverse, data=inverse, op0=nl.multiply, operand0=1.0 / width, op1=nl.add, operand1=NORM_EPS)
    nisa.tensor_scalar(dst=inverse, data=inverse, op0=nl.rsqrt, operand0=0.0)
    return inverse


def _store_gates(out: nl.ndarray, logits: nl.ndarray, factor: float, offset: float) -> None:
    """out fp32 [tiles * rows, HC] in HBM = sigmoid(logits [rows, tiles, HC]) * factor + offset."""
    rows, tiles, count = logits.shape
    gates = nl.ndarray((rows, tiles, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=gates, op=nl.sigmoid, data=logits)
    nisa.tensor_scalar(dst=gates, data=gates, op0=nl.multiply, operand0=factor, op1=nl.add, operand1=offset)
    nisa.dma_copy(dst=out.reshape_dim(0, (tiles, rows)).permute((1, 0, 2)), src=gates)


def _store_comb(out: nl.ndarray, logits: nl.ndarray) -> None:
    """out fp32 [tiles * rows, HC, HC] in HBM = the doubly stochastic matrices of logits [rows, tiles, HC * HC]."""
    rows, tiles, _ = logits.shape
    comb = nl.ndarray((rows, tiles, HC, HC), dtype=nl.float32, buffer=nl.sbuf)
    _softmax(comb, logits.reshape_dim(2, (HC, HC)))
    by_column = comb.permute((0, 1, 3, 2))
    _normalise(by_column)
    for _iteration in range(SINKHORN_ITERS - 1):
        _normalise(comb)
        _normalise(by_column)
    nisa.dma_copy(dst=out.reshape_dim(0, (tiles, rows)).permute((1, 0, 2, 3)), src=comb)


def _softmax(comb: nl.ndarray, logits: nl.ndarray) -> None:
    """comb = softmax of logits over the last axis, plus HC_EPS."""
    rows, tiles, _, _ = comb.shape
    stat = nl.ndarray((rows, tiles, HC), dtype=nl.float32, buffer=nl.sbuf)
    along = stat.expand_dim(3).broadcast(3, HC)
    nisa.tensor_reduce(dst=stat, op=nl.maximum, data=logits, axis=3)
    nisa.tensor_tensor(dst=comb, data1=logits, data2=along, op=nl.subtract)
    nisa.activation(dst=comb, op=nl.exp, data=comb)
    nisa.tensor_reduce(dst=stat, op=nl.add, data=comb, axis=3)
    nisa.reciprocal(dst=stat, data=stat)
    nisa.tensor_tensor(dst=comb, data1=comb, data2=along, op=nl.multiply)
    nisa.tensor_scalar(dst=comb, data=comb, op0=nl.add, operand0=HC_EPS)


def _normalise(comb: nl.ndarray) -> None:
    """comb divided by its sums over the last axis plus HC_EPS, in place."""
    rows, tiles, _, _ = comb.shape
    stat = nl.ndarray((rows, tiles, HC), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=stat, op=nl.add, data=comb, axis=3)
    nisa.tensor_scalar(dst=stat, data=stat, op0=nl.add, operand0=HC_EPS)
    nisa.reciprocal(dst=stat, data=stat)
    nisa.tensor_tensor(dst=comb, data1=comb, data2=stat.expand_dim(3).broadcast(3, HC), op=nl.multiply)
