"""A miniature DeepSeek-V4.1 decoder block on `deepinfer_prep.runtime`, one token a step.

It has what makes the format special: four residual streams with hyper-connection mixes, fp8 projections with a
grouped output projection, attention with one shared key-value head and a sink, routed fp4 experts of which each
step runs the chosen ones, and a shared fp8 expert. Rotary positions and compressed attention are left out.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from deepinfer_prep.runtime import Target, gemm, mhc

STREAMS = 4
ROUTED_SCALING = 1.5
SWIGLU_LIMIT = 10.0
_EPS = 1e-20


@dataclass(frozen=True)
class BlockDims:
    """Sizes of one block, as config.json states them."""

    hidden: int
    heads: int
    head_dim: int
    q_lora: int
    o_groups: int
    o_lora: int
    experts: int
    chosen: int
    expert_inner: int

    @classmethod
    def of_config(cls, text_config: dict[str, int]) -> BlockDims:
        """The block of a checkpoint, from config.json's `text_config`."""
        return cls(
            hidden=text_config["hidden_size"],
            heads=text_config["num_attention_heads"],
            head_dim=text_config["head_dim"],
            q_lora=text_config["q_lora_rank"],
            o_groups=text_config["o_groups"],
            o_lora=text_config["o_lora_rank"],
            experts=text_config["n_routed_experts"],
            chosen=min(2, text_config["n_routed_experts"]),
            expert_inner=text_config["moe_intermediate_size"],
        )


def _frozen(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Norm(nn.Module):
    """Root mean square norm, computed in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = _frozen(width, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)
        return (normal * self.weight.float()).to(torch.bfloat16)


class Fp8Linear(nn.Module):
    """x in fp8 and back, times an e4m3 weight [n, k]."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.weight = _frozen(n, k, dtype=torch.float8_e4m3fn)

    def forward(self, x: Tensor) -> Tensor:
        return gemm.linear_qdq(x, self.weight)


class GroupedFp8Linear(Fp8Linear):
    """Each group of rows of the weight [groups * n, k] takes its own part of x [t, groups * k]."""

    def __init__(self, groups: int, n: int, k: int) -> None:
        super().__init__(groups * n, k)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        codes = self.weight._nki_weight.chunk(self.groups)  # type: ignore[attr-defined]
        scales = self.weight._nki_scale.chunk(self.groups)  # type: ignore[attr-defined]
        operands = zip(x.chunk(self.groups, dim=-1), codes, scales, strict=True)
        return torch.cat([gemm.linear_qdq_raw(*one) for one in operands], dim=-1)


class Attention(nn.Module):
    """Attention of one new token over all tokens so far, whose keys are their values."""

    def __init__(self, dims: BlockDims) -> None:
        super().__init__()
        self.dims = dims
        width = dims.heads * dims.head_dim
        self.wq_a = Fp8Linear(dims.q_lora, dims.hidden)
        self.q_norm = Norm(dims.q_lora)
        self.wq_b = Fp8Linear(width, dims.q_lora)
        self.wkv = Fp8Linear(dims.head_dim, dims.hidden)
        self.kv_norm = Norm(dims.head_dim)
        self.attn_sink = _frozen(dims.heads, dtype=torch.float32)
        self.wo_a = GroupedFp8Linear(dims.o_groups, dims.o_lora, width // dims.o_groups)
        self.wo_b = Fp8Linear(dims.hidden, dims.o_groups * dims.o_lora)

    def forward(self, x: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        """x bf16 [1, h], cache bf16 [tokens, head_dim] (written at `position`), position int64 [1] -> [1, h]."""
        cache[position] = self.kv_norm(self.wkv(x))
        query = self.wq_b(self.q_norm(self.wq_a(x))).view(self.dims.heads, self.dims.head_dim)
        scores = query.float() @ cache.float().T / math.sqrt(self.dims.head_dim)
        is_future = torch.arange(cache.shape[0], device=x.device) > position
        scores = torch.where(is_future, -torch.inf, scores)
        shares = torch.softmax(torch.cat([scores, self.attn_sink.unsqueeze(-1)], dim=-1), dim=-1)[:, :-1]
        mixed = (shares @ cache.float()).to(torch.bfloat16)
        output: Tensor = self.wo_b(self.wo_a(mixed.view(1, -1)))
        return output


class Gate(nn.Module):
    """How much each expert counts: zero for those that are not chosen."""

    def __init__(self, dims: BlockDims) -> None:
        super().__init__()
        self.chosen = dims.chosen
        self.weight = _frozen(dims.experts, dims.hidden, dtype=torch.bfloat16)
        self.bias = _frozen(dims.experts, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """x bf16 [1, h] -> fp32 [1, experts]."""
        affinity = functional.softplus(x.float() @ self.weight.float().T).sqrt()
        chosen = torch.topk(affinity + self.bias, self.chosen, dim=-1).indices
        kept = torch.zeros_like(affinity).scatter(-1, chosen, affinity.gather(-1, chosen))
        return kept / kept.sum(-1, keepdim=True) * ROUTED_SCALING


class Experts(nn.Module):
    """Routed fp4 experts, gate and up projection in one weight, and a shared fp8 expert."""

    def __init__(self, dims: BlockDims) -> None:
        super().__init__()
        self.dims = dims
        self.gate = Gate(dims)
        self.w13 = _frozen(dims.experts, 2 * dims.expert_inner, dims.hidden // 2, dtype=torch.int8)
        self.w2 = _frozen(dims.experts, dims.hidden, dims.expert_inner // 2, dtype=torch.int8)
        self.shared_w13 = Fp8Linear(2 * dims.expert_inner, dims.hidden)
        self.shared_w2 = Fp8Linear(dims.hidden, dims.expert_inner)

    def forward(self, x: Tensor) -> Tensor:
        """x bf16 [1, h] -> bf16 [1, h]."""
        total: Tensor = self.shared_w2(swiglu(self.shared_w13(x))).float()
        weights = self.gate(x)
        for expert in range(self.dims.experts):
            # The kernel reads no weights where the flag is 0, so that a step costs the chosen experts only.
            flag = (weights[:, expert : expert + 1] > 0).int()
            inner = swiglu(self._gated(x, self.w13, expert, flag))
            total = total + weights[:, expert : expert + 1] * self._gated(inner, self.w2, expert, flag).float()
        return total.to(torch.bfloat16)

    def _gated(self, x: Tensor, weight: Tensor, expert: int, flag: Tensor) -> Tensor:
        gated = gemm.linear_qdq_gated(x, weight, expert, flag)
        if gated is not None:
            return gated
        return gemm.linear_qdq(x, weight, expert) * flag.to(x.dtype)


def swiglu(both: Tensor) -> Tensor:
    """Gate and up [t, 2 * n], each limited, -> bf16 [t, n]."""
    gate, up = both.float().chunk(2, dim=-1)
    limited = functional.silu(gate.clamp(max=SWIGLU_LIMIT)) * up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return limited.to(torch.bfloat16)


class Block(nn.Module):
    """Attention and experts, each between the mixes of the residual streams."""

    def __init__(self, dims: BlockDims) -> None:
        super().__init__()
        mixes, width = (2 + STREAMS) * STREAMS, STREAMS * dims.hidden
        self.hc_attn_fn, self.hc_ffn_fn = (_frozen(mixes, width, dtype=torch.float32) for _ in range(2))
        self.hc_attn_base, self.hc_ffn_base = (_frozen(mixes, dtype=torch.float32) for _ in range(2))
        self.hc_attn_scale, self.hc_ffn_scale = (_frozen(3, dtype=torch.float32) for _ in range(2))
        self.attn_norm, self.ffn_norm = Norm(dims.hidden), Norm(dims.hidden)
        self.attn, self.ffn = Attention(dims), Experts(dims)

    def forward(self, residual: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        """residual bf16 [1, 4, h], cache and position as in `Attention.forward` -> bf16 [1, 4, h]."""
        post, comb, x = mhc.pre_big_fuse(residual, self.hc_attn_fn, self.hc_attn_scale, self.hc_attn_base)
        residual = mhc.post(self.attn(self.attn_norm(x), cache, position), residual, post, comb)
        post, comb, x = mhc.pre_big_fuse(residual, self.hc_ffn_fn, self.hc_ffn_scale, self.hc_ffn_base)
        return mhc.post(self.ffn(self.ffn_norm(x)), residual, post, comb)


_ROUTED = re.compile(r"ffn\.experts\.(\d+)\.(w[123])\.weight")
_SHARED = re.compile(r"ffn\.shared_experts\.(w[123])\.weight")


def rename(prefix: str, name: str) -> str | Target | None:
    """Where a tensor of the checkpoint goes in the block of one layer; None for tensors of other layers.

    Scales are not asked for: they come with their weights.
    """
    if not name.startswith(prefix) or name.endswith((".scale", ".bias_vl")):
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
