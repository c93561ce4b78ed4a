"""The example's small modules: norms, projections and experts."""

from __future__ import annotations

import torch
from example_arithmetic import Arithmetic
from example_dims import ROUTED_SCALING, BlockDims
from torch import Tensor, nn
from torch.nn import functional

from deepinfer_prep.runtime import norm


def frozen(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A weight of the checkpoint, without memory of its own under torch.device("meta")."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Norm(nn.Module):
    """Root mean square norm, computed in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = frozen(width, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return norm.rmsnorm(x, self.weight)


class Plain(nn.Module):
    """x times a bf16 weight [n, k], in fp32."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.weight = frozen(n, k, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x.float() @ self.weight.float().T


class Fp8Linear(nn.Module):
    """x times an e4m3 weight [n, k]."""

    def __init__(self, n: int, k: int, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.arithmetic = arithmetic
        self.weight = frozen(n, k, dtype=torch.float8_e4m3fn)

    def forward(self, x: Tensor) -> Tensor:
        return self.arithmetic.linear(x, self.weight)


class GroupedFp8Linear(Fp8Linear):
    """Each group of rows of the weight [groups * n, k] takes its own part of x [t, groups * k]."""

    def __init__(self, groups: int, n: int, k: int, arithmetic: Arithmetic) -> None:
        super().__init__(groups * n, k, arithmetic)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        return self.arithmetic.grouped(x, self.weight, self.groups)


class Gate(nn.Module):
    """How much each expert counts: zero for those that are not chosen."""

    def __init__(self, dims: BlockDims) -> None:
        super().__init__()
        self.chosen = dims.chosen
        self.weight = frozen(dims.experts, dims.hidden, dtype=torch.bfloat16)
        self.bias = frozen(dims.experts, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """x [t, h] -> fp32 [t, experts]."""
        affinity = functional.softplus(x.float() @ self.weight.float().T).sqrt()
        chosen = torch.topk(affinity + self.bias, self.chosen, dim=-1).indices
        kept = torch.zeros_like(affinity).scatter(-1, chosen, affinity.gather(-1, chosen))
        return kept / kept.sum(-1, keepdim=True) * ROUTED_SCALING


class Experts(nn.Module):
    """Routed fp4 experts, gate and up projection in one weight, and a shared fp8 expert."""

    def __init__(self, dims: BlockDims, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.dims, self.arithmetic = dims, arithmetic
        self.gate = Gate(dims)
        self.w13 = frozen(dims.experts, 2 * dims.expert_inner, dims.hidden // 2, dtype=torch.int8)
        self.w2 = frozen(dims.experts, dims.hidden, dims.expert_inner // 2, dtype=torch.int8)
        self.shared_w13 = Fp8Linear(2 * dims.expert_inner, dims.hidden, arithmetic)
        self.shared_w2 = Fp8Linear(dims.hidden, dims.expert_inner, arithmetic)

    def forward(self, x: Tensor) -> Tensor:
        """x [t, h] -> [t, h]."""
        total: Tensor = self.shared_w2(_activated(self.shared_w13(x))).float()
        weights = self.gate(x)
        for expert in range(self.dims.experts):
            share = weights[:, expert : expert + 1]
            flag = (share > 0).any().int().view(1, 1)
            inner = _activated(self.arithmetic.gated(x, self.w13, expert, flag))
            total = total + share * self.arithmetic.gated(inner, self.w2, expert, flag).float()
        return total.to(x.dtype)


def _activated(both: Tensor) -> Tensor:
    """Gate and up [t, 2 * n] -> [t, n]."""
    gate, up = both.chunk(2, dim=-1)
    return norm.swiglu(gate, up)
