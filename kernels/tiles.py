"""Building blocks of the GEMM kernels: which rows and columns a tile holds, and how it gets on chip and off again.

Weights arrive as [n, k], but TensorE contracts over partitions, so k has to become the partition dimension. Bytes
are transposed two at a time: a row seen as bf16 "pairs" goes through TensorE's transpose mode, bit-exact on trn2, which
moves two fp8 codes (or four fp4 codes) per element and leaves a pair's bytes side by side. In a k tile of
`planes * 128` columns, partition p then holds columns planes * p ... planes * p + planes - 1, each of them a strided
view that TensorE reads as it is. Activations are transposed the same way, as fp32 pairs of bf16 values, so that both
sides of a matmul agree.
"""

import nki.isa as nisa
import nki.language as nl

P = 128
"""Partitions of SBUF and PSUM."""

BANK_FP32 = 512
"""fp32 elements in a partition of one PSUM bank (2 KiB)."""

TILES_PER_BANK = 8
"""Transposed [128, 128] tiles of two-byte elements in one PSUM bank."""

LOAD_BYTES = 4096
"""Contiguous bytes a partition that a weight DMA asks for: where HBM bandwidth saturates."""


M_MAX = 512
"""Rows of x that a GEMM kernel takes: the moving columns of one matmul."""


def check_sizes(m: int, n: int, k: int) -> None:
    """The sizes that every GEMM kernel takes."""
    cores = nl.num_programs(axes=0) if nl.program_ndim() != 0 else 1
    assert 1 <= m <= M_MAX, f"m is {m}, must be 1 to {M_MAX}: split x by rows"
    assert k % P == 0, f"k is {k}, must be a multiple of {P}"
    assert n % 32 == 0, f"n is {n}, must be a multiple of 32"
    assert cores == 1 or n % (cores * P) == 0, f"n is {n}, must be a multiple of {cores * P} on {cores} cores"


def fold_factor(units: int, rows: int) -> int:
    """How many equal segments a row of `units` units splits into so that rows * segments <= 128."""
    factor = max(1, min(units, P // rows))
    while units % factor != 0:
        factor -= 1
    return factor


def my_columns(n: int) -> list[int]:
    """[first, size] of this program's output columns: all of them, or an equal share in a grid."""
    if nl.program_ndim() == 0:
        return [0, n]
    share = n // nl.num_programs(axes=0)
    return [nl.program_id(axis=0) * share, share]


def k_groups(k: int, width: int, per_bank: int) -> list[list[int]]:
    """k in tiles of `width` columns, grouped by PSUM bank: [first tile, tiles, partitions of a tile].

    What k leaves over is one narrower tile, on fewer partitions, in a group of its own.
    """
    groups = []
    full = k // width
    first = 0
    while first < full:
        count = min(per_bank, full - first)
        groups.append([first, count, P])
        first += count
    if k % width != 0:
        groups.append([full, 1, k % width * P // width])
    return groups


def rows_per_partition(row_bytes: int) -> int:
    """How many consecutive weight rows one partition takes, so that short rows still make long DMA runs."""
    count = 1
    while count * row_bytes < LOAD_BYTES and count < TILES_PER_BANK:
        count *= 2
    return count


def row_groups(first: int, size: int, most: int) -> list[list[int]]:
    """Weight rows in groups whose results are stored together: [first row, loads, rows a partition, partitions].

    A load takes `most` rows a partition, or fewer where less than 128 times that many are left.
    """
    groups = []
    end = first + size
    row = first
    per_partition = most
    while row < end:
        while per_partition > 1 and end - row < per_partition * P:
            per_partition = per_partition // 2
        loads = min(TILES_PER_BANK // per_partition, (end - row) // (per_partition * P))
        partitions = P
        if loads == 0:
            loads = 1
            partitions = end - row
        groups.append([row, loads, per_partition, partitions])
        row += loads * per_partition * partitions
    return groups


def load_weights(w: nl.ndarray, row: int, per_partition: int, partitions: int) -> nl.ndarray:
    """Consecutive rows of w uint8 [n, row bytes] as uint8 [partitions, per_partition, row bytes] in SBUF."""
    row_bytes = w.shape[1]
    tile = nl.ndarray((partitions, per_partition, row_bytes), dtype=nl.uint8, buffer=nl.sbuf)
    rows = w[row : row + partitions * per_partition, :]
    nisa.dma_copy(dst=tile, src=rows.reshape_dim(0, (partitions, per_partition)))
    return tile


def transpose_weights(tile: nl.ndarray, group: list[int]) -> nl.ndarray:
    """One bank of transposed byte pairs: bf16 [partitions, k tiles, rows a partition, row partitions] in PSUM.

    `tile` is what load_weights returned, `group` one of k_groups with at most 8 tiles over all rows a partition.
    """
    rows, per_partition, _ = tile.shape
    first = group[0]
    count = group[1]
    partitions = group[2]
    pairs = tile.view(nl.bfloat16)
    bank = nl.ndarray((partitions, count, per_partition, rows), dtype=nl.bfloat16, buffer=nl.psum)
    for index in range(count):
        start = (first + index) * P
        for r in range(per_partition):
            nisa.nc_transpose(dst=bank[:, index, r, :], data=pairs[:, r, start : start + partitions])
    return bank


def load_folded(sources: list[nl.ndarray], first_row: int, rows: int, segments: int, width: int) -> nl.ndarray:
    """The first segments * width columns of bf16 matrices, stacked and folded: bf16 [rows * segments, width] in SBUF.

    A row takes `segments` partitions, so that few rows keep many partitions busy. `rows` counts those of one matrix.
    """
    height = rows * segments
    tile = nl.ndarray((len(sources) * height, width), dtype=nl.bfloat16, buffer=nl.sbuf)
    for index in range(len(sources)):
        block = sources[index][first_row : first_row + rows, 0 : segments * width]
        dst = tile[index * height : (index + 1) * height, :]
        if segments == 1:
            nisa.dma_copy(dst=dst, src=block)
        elif segments * width == sources[index].shape[1]:
            nisa.dma_copy(dst=dst, src=block.reshape((height, width)))
        else:
            for row in range(rows):
                part = dst[row * segments : (row + 1) * segments, :]
                nisa.dma_copy(dst=part, src=block[row : row + 1, :].reshape((segments, width)))
    return tile


def transpose_folded(dst: nl.ndarray, folded: nl.ndarray) -> None:
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
            bank = nl.ndarray((partitions, count, height), dtype=nl.float32, buffer=nl.psum)
            for index in range(count):
                nisa.nc_transpose(dst=bank[:, index, :], data=pairs[:, first + index, :, half])
            nisa.tensor_copy(
                dst=dst[:, :, first : first + count, half, :].permute((0, 2, 3, 1)),
                src=bank.reshape_dim(2, (rows, segments)),
                engine=nisa.engine.vector,
            )


def k_tiles(k: int, width: int) -> int:
    """Number of k tiles, the narrower last one included."""
    return (k + width - 1) // width


def plane_view(transposed: nl.ndarray) -> nl.ndarray:
    """Transposed activations fp32 [128, k tiles, halves, m] as bf16 [128, k tiles, halves, m, 2]."""
    return transposed.view(nl.bfloat16).reshape_dim(3, (transposed.shape[3], 2))


def store_rows(out: nl.ndarray, column: int, y: nl.ndarray, loads: int, per_partition: int) -> None:
    """Transpose and store a row group's results: y bf16 [partitions, loads * per_partition, m] to out bf16 [m, n]."""
    partitions, tiles, m = y.shape
    columns = tiles * partitions
    for start in range(0, m, P):
        rows = min(P, m - start)
        bank = nl.ndarray((rows, tiles, partitions), dtype=nl.bfloat16, buffer=nl.psum)
        for tile in range(tiles):
            nisa.nc_transpose(dst=bank[:, tile, :], data=y[:, tile, start : start + rows])
        block = nl.ndarray((rows, loads, partitions, per_partition), dtype=nl.bfloat16, buffer=nl.sbuf)
        nisa.tensor_copy(
            dst=block.permute((0, 1, 3, 2)),
            src=bank.reshape_dim(1, (loads, per_partition)),
            engine=nisa.engine.vector,
        )
        nisa.dma_copy(dst=out[start : start + rows, column : column + columns], src=block.reshape((rows, columns)))
