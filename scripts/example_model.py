"""A miniature DeepSeek-V4.1 layer on `deepinfer_prep.runtime`, for one sequence, any number of tokens a step.

It has what makes the format special: four residual streams with hyper-connection mixes, fp8 projections with a
grouped output projection, attention with one shared key-value head, a sink, rotary positions, a window and compressed
entries that an index chooses from, routed fp4 experts of which each step runs the chosen ones, and a shared fp8 expert.
"""

from __future__ import annotations

import re

import torch
from example_arithmetic import SERVED, Arithmetic
from example_attention import Attention, Caches, Choice
from example_dims import STREAMS, BlockDims
from example_modules import Experts, Norm, frozen
from torch import Tensor, nn

from deepinfer_prep.runtime import Target, mhc


class Block(nn.Module):
    """Attention and experts, each between the mixes of the residual streams."""

    def __init__(self, dims: BlockDims, arithmetic: Arithmetic = SERVED) -> None:
        super().__init__()
        mixes, width = (2 + STREAMS) * STREAMS, STREAMS * dims.hidden
        self.hc_attn_fn, self.hc_ffn_fn = (frozen(mixes, width, dtype=torch.float32) for _ in range(2))
        self.hc_attn_base, self.hc_ffn_base = (frozen(mixes, dtype=torch.float32) for _ in range(2))
        self.hc_attn_scale, self.hc_ffn_scale = (frozen(3, dtype=torch.float32) for _ in range(2))
        self.attn_norm, self.ffn_norm = Norm(dims.hidden), Norm(dims.hidden)
        self.attn, self.ffn = Attention(dims, arithmetic), Experts(dims, arithmetic)

    def forward(
        self, residual: Tensor, caches: Caches, positions: Tensor, choice: Choice | None = None
    ) -> tuple[Tensor, Choice | None]:
        """residual [t, 4, h], positions int32 [t] in order, choice of the layers before -> [t, 4, h], choice."""
        post, comb, x = mhc.pre_big_fuse(residual, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base)
        mixed, choice = self.attn(self.attn_norm(x), caches, positions, choice)
        residual = mhc.post(mixed, residual, post, comb)
        post, comb, x = mhc.pre_big_fuse(residual, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base)
        return mhc.post(self.ffn(self.ffn_norm(x)), residual, post, comb), choice


_ROUTED = re.compile(r"ffn\.experts\.(\d+)\.(w[123])\.weight")
_SHARED = re.compile(r"ffn\.shared_experts\.(w[123])\.weight")
_NOT_MODELLED = re.compile(r".*\.(scale|bias_vl)|engram\..*")


def rename(prefix: str, name: str) -> str | Target | None:
    """Where a tensor of the checkpoint goes in the block of one layer; None for tensors of other layers.

    Scales are not asked for: they come with their weights.
    """
    if not name.startswith(prefix) or _NOT_MODELLED.fullmatch(name[len(prefix) :]):
        return None
    inner = name[len(prefix) :]
    if routed := _ROUTED.fullmatch(inner):
        expert, matrix = int(routed[1]), routed[2]
        return Target("ffn.w2", expert) if matrix == "w2" else Target("ffn.w13", expert, part=int(matrix == "w3"))
    if shared := _SHARED.fullmatch(inner):
        if shared[1] == "w2":
            return "ffn.shared_w2.weight"
        return Target("ffn.shared_w13.weight", part=int(shared[1] == "w3"))
    return inner
