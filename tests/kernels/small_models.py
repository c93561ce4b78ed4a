"""Norm, SwiGLU, pool and index kernels on DeepSeek-V4.1's shapes through the cost model.

The floor of each is the time to move what it reads and writes once.
"""

from __future__ import annotations

from nki_emulator import TensorSpec, installed
from nki_emulator.cost import ENGINES, HERTZ, KernelCost, ProgramCost, hbm_floor

from tests.kernels.models import HIDDEN, Modelled, kernel_model

with installed():
    from deepinfer_prep.kernels import (
        compress_pool,
        fp4_expert,
        fp8_expert,
        fp8_expert_kmajor,
        index_candidates,
        index_score,
        rmsnorm,
        swiglu,
    )

INTER = 2304
LATENT = 512
HEADS, HEAD_DIM = 32, 128
LONG = 32768
"""Entries after which an index kernel's work repeats, on one core or two: a multiple of what it loads at a time."""

CANDIDATES = 2048
"""Blocks of 8 entries that a consumer of candidates looks at."""

CONTEXTS = {"8k": 8192, "128k": 131072, "1M": 1048576}
"""Tokens of context: at ratio 1 as many entries, at ratio 2 half of them."""


def expert_model(tokens: int, cores: int = 2) -> Modelled:
    """A routed expert in one launch. The floor is the time to read its three weights once, without scales."""
    up, up_scale = TensorSpec((INTER, HIDDEN // 2), "uint8"), TensorSpec((INTER, HIDDEN // 32), "uint8")
    down, down_scale = TensorSpec((HIDDEN, INTER // 2), "uint8"), TensorSpec((HIDDEN, INTER // 32), "uint8")
    x, weight = TensorSpec((tokens, HIDDEN), "bfloat16"), TensorSpec((tokens, 1), "float32")
    arguments = [x, up, up_scale, up, up_scale, down, down_scale, weight]
    return kernel_model(fp4_expert.kernel, arguments, 3 * INTER * HIDDEN // 2, cores)


def shared_expert_model(tokens: int, *, is_kmajor: bool = False, cores: int = 2) -> Modelled:
    """The expert that all tokens share, e4m3, in one launch. The floor is as in `expert_model`."""
    up, up_scale = TensorSpec((INTER, HIDDEN), "uint8"), TensorSpec((INTER // 32, HIDDEN // 32), "uint8")
    down, down_scale = TensorSpec((HIDDEN, INTER), "uint8"), TensorSpec((HIDDEN // 32, INTER // 32), "uint8")
    x, weight = TensorSpec((tokens, HIDDEN), "bfloat16"), TensorSpec((tokens, 1), "float32")
    kernel = fp8_expert_kmajor.kernel if is_kmajor else fp8_expert.kernel
    return kernel_model(kernel, [x, up, up_scale, up, up_scale, down, down_scale, weight], 3 * INTER * HIDDEN, cores)


def norm_model(tokens: int, columns: int = HIDDEN, cores: int = 2) -> Modelled:
    """RMS norm of `tokens` rows."""
    x, weight = TensorSpec((tokens, columns), "bfloat16"), TensorSpec((columns,), "bfloat16")
    return kernel_model(rmsnorm.kernel, [x, weight], 4 * tokens * columns, cores)


def swiglu_model(tokens: int, columns: int = INTER, cores: int = 2) -> Modelled:
    """SwiGLU between an expert's projections."""
    gate = TensorSpec((tokens, columns), "bfloat16")
    return kernel_model(swiglu.kernel, [gate, gate], 6 * tokens * columns, cores)


def pool_model(groups: int, ratio: int = 2, columns: int = LATENT, cores: int = 2) -> Modelled:
    """The pool of `groups` groups."""
    score = TensorSpec((groups, ratio, columns), "float32")
    return kernel_model(compress_pool.kernel, [score, score], groups * columns * (8 * ratio + 2), cores)


def index_model(tokens: int, entries: int, sequences: int = 1, cores: int = 2) -> Modelled:
    """Index scores of `tokens` queries, equally many of each sequence, over `entries` entries of each.

    A kernel does the same for every sequence and every LONG entries: of large ones two small ones are modelled, and
    the line through them.
    """
    size = 2 * sequences * HEAD_DIM * entries + 4 * tokens * entries
    if sequences > 2:
        each = tokens // sequences
        ends = index_model(each, entries, 1, cores), index_model(2 * each, entries, 2, cores)
        return _on_line(*ends, sequences - 1, hbm_floor(size, cores))
    if entries > 2 * LONG:
        ends = index_model(tokens, LONG, sequences, cores), index_model(tokens, 2 * LONG, sequences, cores)
        return _on_line(*ends, entries // LONG - 1, hbm_floor(size, cores))
    q, weights = TensorSpec((tokens, HEADS, HEAD_DIM), "bfloat16"), TensorSpec((tokens, HEADS), "float32")
    keys = TensorSpec((sequences, HEAD_DIM, entries), "bfloat16")
    return kernel_model(index_score.kernel, [q, keys, weights, TensorSpec((tokens,), "int32"), entries], size, cores)


def candidates_model(tokens: int, entries: int, sequences: int = 1, cores: int = 2) -> Modelled:
    """Index scores of CANDIDATES blocks of each query's own."""
    if sequences > 2:
        each = tokens // sequences
        ends = candidates_model(each, entries, 1, cores), candidates_model(2 * each, entries, 2, cores)
        return _on_line(*ends, sequences - 1, tokens * ends[0].floor / each)
    q, weights = TensorSpec((tokens, HEADS, HEAD_DIM), "bfloat16"), TensorSpec((tokens, HEADS), "float32")
    rows, klen = TensorSpec((sequences, entries, HEAD_DIM), "bfloat16"), TensorSpec((tokens,), "int32")
    arguments = [q, rows, weights, klen, TensorSpec((tokens, CANDIDATES), "int32")]
    size = tokens * CANDIDATES * 8 * (2 * HEAD_DIM + 4)
    return kernel_model(index_candidates.kernel, arguments, size, cores)


def top_k_rounds(queries: int, entries: int, k: int = 512) -> float:
    """Seconds of one core to find the k best of each query's entries, eight a round: max8, nc_match_replace8.

    A query's entries lie on several partitions, which find their k best side by side; what they found is searched
    again. The best split of 128 partitions is taken. Nothing is counted for moving and for the places.
    """
    rounds = 2 * -(-k // 8)
    splits = range(1, max(1, 128 // queries) + 1)
    tiles = -(-queries // 128)
    cycles = min(tiles * rounds * (entries / split + (k * split if split > 1 else 0)) for split in splits)
    return cycles / HERTZ["vector"]


def _on_line(first: Modelled, second: Modelled, steps: int, floor: float) -> Modelled:
    """`steps` times the difference of two models beyond the first, engine by engine."""

    def extended(one: KernelCost, two: KernelCost) -> KernelCost:
        pairs = zip(one.programs, two.programs, strict=True)
        return KernelCost(
            tuple(
                ProgramCost({name: a.seconds[name] + steps * (b.seconds[name] - a.seconds[name]) for name in ENGINES})
                for a, b in pairs
            )
        )

    return Modelled(extended(first.cost, second.cost), extended(first.pessimistic, second.pessimistic), floor)
