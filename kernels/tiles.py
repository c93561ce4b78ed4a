"""Building blocks of the GEMM kernels: which rows and columns a tile holds, and how it gets on chip and off again.

Dimensions, as the docstrings of all GEMM kernels name them:
    m           rows of x and of the result, 1 to 512
    n           rows of w, columns of the result
    k           columns of x and of w (logical: two to a byte of fp4), over which products are summed
    partitions  dimension 0 of a tile on chip, at most 128
    width       columns of a k tile, planes * 128: what one transposed tile of w holds of k
    planes      columns of k that lie on one partition of a k tile: 2 for fp8, 4 for fp4
    halves      fp32 pairs of x on one partition of a k tile, planes / 2
    blocks      scale blocks of a k tile
    segments    partitions that one row of x takes when it is folded

Weights arrive as [n, k], but TensorE contracts over partitions, so k has to become the partition dimension. Bytes
are transposed two at a time: a row seen as bf16 "pairs" goes through TensorE's transpose mode, bit-exact on trn2, which
moves two fp8 codes (or four fp4 codes) per element and leaves a pair's bytes side by side. In a k tile of
`planes * 128` columns, partition p then holds columns planes * p ... planes * p + planes - 1, each of them a strided
view that TensorE reads as it is. Activations are transposed the same way, as fp32 pairs of bf16 values, so that both
sides of a matmul agree.

Results are [rows of w, m] and go back through a transpose too. A row group is what shares one: `stacks * runs` loads of
`per_partition` consecutive rows on each partition, arranged as [partitions, stacks, runs, per_partition, m]. After the
transpose m and stacks are the partitions, and runs * partitions * per_partition consecutive output columns lie in one.
"""

import nki.isa as nisa
import nki.language as nl

from .constants import K_MULTIPLE, M_MAX, N_MULTIPLE, TWO_CORE_N_MULTIPLE
from .records import KGroup, RowGroup, Share
from .tile_pool import BANK_FP32, P, TilePool, psum_tile, sbuf_tile

TILES_PER_BANK = 8
"""Transposed [128, 128] tiles of two-byte elements in one PSUM bank."""

TILES_PER_RUN = 4
"""Tiles of 128 output columns that one partition of a result holds: an fp32 PSUM bank."""

LOAD_BYTES = 4096
"""Contiguous bytes a partition that a weight DMA asks for: where HBM bandwidth saturates."""


def check_sizes(m: int, n: int, k: int) -> None:
    """The sizes that every GEMM kernel takes."""
    cores = nl.num_programs(axes=0) if nl.program_ndim() != 0 else 1
    n_multiple = N_MULTIPLE if cores == 1 else TWO_CORE_N_MULTIPLE
    assert 1 <= m <= M_MAX, f"m is {m}, must be 1 to {M_MAX}: split x by rows"
    assert k % K_MULTIPLE == 0, f"k is {k}, must be a multiple of {K_MULTIPLE}"
    assert n % n_multiple == 0, f"n is {n}, must be a multiple of {n_multiple} on {cores} cores"


def k_tiles(k: int, width: int) -> int:
    """Number of k tiles of `width` columns, the narrower last one included."""
    return (k + width - 1) // width


def k_groups(k: int, width: int, per_bank: int) -> list[KGroup]:
    """k in tiles of `width` columns, grouped by PSUM bank, `per_bank` tiles at most.

    What k leaves over is one narrower tile, on fewer partitions, in a group of its own.
    """
    groups = []
    full = k // width
    first = 0
    while first < full:
        count = min(per_bank, full - first)
        groups.append(KGroup(first, first + count, count, P))
        first += count
    if k % width != 0:
        groups.append(KGroup(full, full + 1, 1, k % width * P // width))
    return groups


def row_groups(share: Share, row_bytes: int, m: int) -> list[RowGroup]:
    """This program's rows of w, by the result transpose that they share.

    Short rows are loaded several to a partition, so that DMA runs stay long.

    Pseudocode:
        while rows are left:
            take loads of per_partition * 128 rows, as many as fit a result transpose of m columns
            (halve per_partition, then partitions, when fewer rows are left)
    """
    tiles = min(TILES_PER_RUN, max(1, BANK_FP32 // m))
    per_partition = 1
    while per_partition * row_bytes < LOAD_BYTES and per_partition * 2 <= tiles:
        per_partition *= 2
    groups = []
    end = share.end
    row = share.first
    while row < end:
        while per_partition > 1 and end - row < per_partition * P:
            per_partition = per_partition // 2
        partitions = min(P, end - row)
        loads = (end - row) // (per_partition * partitions)
        runs = min(tiles // per_partition, loads)
        stacks = min(max(1, P // m), loads // runs)
        groups.append(RowGroup(row, stacks, runs, per_partition, partitions, per_partition * partitions))
        row += stacks * runs * per_partition * partitions
    return groups


def load_weights(pool: TilePool, w: nl.ndarray, row: int, per_partition: int, partitions: int) -> nl.ndarray:
    """Consecutive rows of w uint8 [n, row bytes] as uint8 [partitions, per_partition, row bytes] in SBUF."""
    tile = sbuf_tile(pool, "weights", (partitions, per_partition, w.shape[1]), nl.uint8)
    rows = w[row : row + partitions * per_partition, :]
    nisa.dma_copy(dst=tile, src=rows.reshape_dim(0, (partitions, per_partition)))
    return tile


def transpose_weights(pool: TilePool, tile: nl.ndarray, group: KGroup) -> nl.ndarray:
    """One bank of transposed byte pairs: bf16 [partitions, k tiles, rows a partition, row partitions] in PSUM.

    `tile` is what load_weights returned, `group` one of k_groups with at most 8 tiles over all rows a partition.
    """
    rows, per_partition, _ = tile.shape
    pairs = tile.view(nl.bfloat16)
    bank = psum_tile(pool, (group.partitions, group.tiles, per_partition, rows), nl.bfloat16)
    for index in range(group.tiles):
        start = (group.first + index) * P
        for r in range(per_partition):
            nisa.nc_transpose(dst=bank[:, index, r, :], data=pairs[:, r, start : start + group.partitions])
    return bank


def fold_factor(units: int, rows: int) -> int:
    """How many equal segments a row of `units` units splits into so that rows * segments <= 128."""
    factor = max(1, min(units, P // rows))
    while units % factor != 0:
        factor -= 1
    return factor


def load_folded(
    pool: TilePool, sources: list[nl.ndarray], row: int, rows: int, column: int, segments: int, width: int
) -> nl.ndarray:
    """Rows of bf16 matrices in HBM, stacked and folded: bf16 [matrices * rows * segments, width] in SBUF.

    Of each matrix `rows` rows from `row` on and segments * width columns from `column` on. A row takes `segments`
    partitions, so that few rows keep many partitions busy.
    """
    height = rows * segments
    tile = sbuf_tile(pool, "x", (len(sources) * height, width), nl.bfloat16)
    for index in range(len(sources)):
        block = sources[index][row : row + rows, column : column + segments * width]
        _fold(tile[index * height : (index + 1) * height, :], block, segments)
    return tile


def _fold(dst: nl.ndarray, block: nl.ndarray, segments: int) -> None:
    """block [rows, columns] in HBM into dst [rows * segments, columns / segments], the same shape on both sides.

    Whole rows of a matrix lie in one run, of which a DMA takes as many pieces as there are; others take a DMA each.
    """
    rows, columns = block.shape
    width = columns // segments
    if segments == 1:
        nisa.dma_copy(dst=dst, src=block)
    elif block.is_contiguous():
        nisa.dma_copy(dst=dst, src=block.reshape((rows * segments, width)))
    else:
        for row in range(rows):
            pieces = block[row : row + 1, :].reshape((segments, width))
            nisa.dma_copy(dst=dst[row * segments : (row + 1) * segments, :], src=pieces)


def transpose_folded(pool: TilePool, dst: nl.ndarray, folded: nl.ndarray) -> None:
    """Transpose bf16 [rows * segments, columns] as pairs into fp32 dst [partitions, segments, k tiles, halves, rows].

    Pair `halves * p + half` of a k tile of 2 * halves * partitions columns goes to partition p.
    """
    partitions, segments, tiles, halves, rows = dst.shape
    height = rows * segments
    pairs = folded.view(nl.float32).reshape((height, tiles, partitions, halves))
    per_bank = BANK_FP32 // height
    for half in range(halves):
        for first in range(0, tiles, per_bank):
            count = min(per_bank, tiles - first)
            bank = psum_tile(pool, (partitions, count, height), nl.float32)
            for index in range(count):
                nisa.nc_transpose(dst=bank[:, index, :], data=pairs[:, first + index, :, half])
            nisa.tensor_copy(
                dst=dst[:, :, first : first + count, half, :].permute((0, 2, 3, 1)),
                src=bank.reshape_dim(2, (rows, segments)),
                engine=nisa.engine.vector,
            )


def plane_view(transposed: nl.ndarray) -> nl.ndarray:
    """Transposed activations fp32 [128, k tiles, halves, m] as bf16 [128, k tiles, halves, m, 2]."""
    return transposed.view(nl.bfloat16).reshape_dim(3, (transposed.shape[3], 2))


def store_results(pool: TilePool, out: nl.ndarray, column: int, y: nl.ndarray) -> None:
    """Transpose a row group's results, round them to bf16 and store them from `column` of out bf16 [m, n] on.

    y fp32 [partitions, stacks, runs, rows a partition, m] in SBUF.
    """
    partitions, stacks, runs, per_partition, m = y.shape
    span = runs * partitions * per_partition
    for start in range(0, m, P):
        rows = min(P, m - start)
        bank = psum_tile(pool, (stacks * rows, runs, partitions, per_partition), nl.float32)
        for run in range(runs):
            for r in range(per_partition):
                nisa.nc_transpose(dst=bank[:, run, :, r], data=y[:, :, run, r, start : start + rows])
        block = sbuf_tile(pool, "results", (stacks * rows, span), nl.bfloat16)
        nisa.tensor_copy(dst=block, src=bank.reshape((stacks * rows, span)), engine=nisa.engine.vector)
        _unstack(out[start : start + rows, column : column + stacks * span], block, stacks)


def _unstack(columns: nl.ndarray, block: nl.ndarray, stacks: int) -> None:
    """block [stacks * rows, span] into columns [rows, stacks * span] in HBM, the same shape on both sides of a DMA."""
    rows = columns.shape[0]
    span = block.shape[1]
    if rows == 1:
        nisa.dma_copy(dst=columns.reshape((stacks, span)), src=block)
    else:
        for stack in range(stacks):
            part = columns[:, stack * span : (stack + 1) * span]
            nisa.dma_copy(dst=part, src=block[stack * rows : (stack + 1) * rows, :])
