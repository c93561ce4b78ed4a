"""Every tensor of a DeepSeek-V4.1 checkpoint: name, dtype and shape, in the order of the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .dims import ModelDims

Element = Literal["e4m3", "e2m1"]
"""How a weight is stored: one e4m3fn value a byte, or two e2m1 values with the even column in the low four bits."""

ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E8M0": 1, "F8_E4M3": 1, "I8": 1}


@dataclass(frozen=True)
class Tensor:
    """A stored tensor: name, safetensors dtype, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Plain:
    """A tensor stored as it is (BF16 or F32), with values around `center`."""

    stored: Tensor
    center: float = 0.0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.stored,)

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the source values; anything below two dimensions is one row."""
        shape = self.stored.shape
        return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


@dataclass(frozen=True)
class Quantized:
    """A weight and its power-of-two scales: one scale multiplies a block of `block_rows` x 32 values."""

    weight: Tensor
    scale: Tensor
    block_rows: int
    element: Element

    center = 0.0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.weight, self.scale

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the source values."""
        rows, columns = self.weight.shape
        return rows, columns * (2 if self.element == "e2m1" else 1)


Entry = Plain | Quantized


def entries(dims: ModelDims) -> Iterator[Entry]:
    """All tensors of the checkpoint, engram tables within their layers."""
    yield _bf16("embed.weight", dims.vocab, dims.hidden)
    for layer in range(dims.layers):
        prefix = f"layers.{layer}."
        yield from _block(prefix, dims, dims.experts)
        yield from _compressed_attention(prefix, layer, dims)
        if layer in dims.engram_layers:
            yield from _engram(prefix, dims.engram_rows[dims.engram_layers.index(layer)], dims)
    for stage in range(dims.draft_stages):
        yield from _draft_stage(stage, dims)
    yield from _vision(dims)
    yield _norm("norm.weight", dims.hidden)
    yield _bf16("head.weight", dims.vocab, dims.hidden)


def total_bytes(dims: ModelDims) -> int:
    """Bytes of all tensors, headers excluded: the index's `metadata.total_size`."""
    return sum(tensor.nbytes for entry in entries(dims) for tensor in entry.tensors)


def _block(prefix: str, dims: ModelDims, experts: int) -> Iterator[Entry]:
    yield from _attention(prefix + "attn.", dims)
    yield from _experts(prefix + "ffn.", dims, experts)
    yield _norm(prefix + "attn_norm.weight", dims.hidden)
    yield _norm(prefix + "ffn_norm.weight", dims.hidden)
    mixes = (2 + dims.streams) * dims.streams
    for part in ("attn", "ffn"):
        yield _f32(f"{prefix}hc_{part}_fn", mixes, dims.streams * dims.hidden)
        yield _f32(f"{prefix}hc_{part}_base", mixes)
        yield _f32(f"{prefix}hc_{part}_scale", 3)


def _attention(prefix: str, dims: ModelDims) -> Iterator[Entry]:
    width = dims.heads * dims.head_dim
    yield _fp8(prefix + "wq_a", dims.q_lora, dims.hidden)
    yield _fp8(prefix + "wq_b", width, dims.q_lora)
    yield _fp8(prefix + "wkv", dims.head_dim, dims.hidden)
    yield _fp8(prefix + "wo_a", dims.o_groups * dims.o_lora, width // dims.o_groups)
    yield _fp8(prefix + "wo_b", dims.hidden, dims.o_groups * dims.o_lora)
    yield _f32(prefix + "attn_sink", dims.heads)
    yield _norm(prefix + "q_norm.weight", dims.q_lora)
    yield _norm(prefix + "kv_norm.weight", dims.head_dim)


def _compressed_attention(prefix: str, layer: int, dims: ModelDims) -> Iterator[Entry]:
    owner = layer in dims.kv_sources
    if owner:
        compressor = prefix + "attn.compressor."
        yield _bf16(compressor + "wkv.weight", dims.head_dim, dims.hidden)
        if dims.compress_ratios[layer] > 1:
            yield _bf16(compressor + "wgate.weight", dims.head_dim, dims.hidden)
        yield _norm(compressor + "norm.weight", dims.head_dim)
    if layer in dims.index_sources:
        indexer = prefix + "attn.indexer."
        yield _fp8(indexer + "wq_b", dims.index_heads * dims.index_dim, dims.q_lora)
        yield _bf16(indexer + "weights_proj.weight", dims.index_heads, dims.hidden)
        if owner:
            yield _bf16(indexer + "wk.weight", dims.index_dim, dims.head_dim)
            yield _norm(indexer + "k_norm.weight", dims.index_dim)


def _experts(prefix: str, dims: ModelDims, experts: int) -> Iterator[Entry]:
    yield _bf16(prefix + "gate.weight", experts, dims.hidden)
    yield _f32(prefix + "gate.bias", experts)
    yield _f32(prefix + "gate.bias_vl", experts)
    wide, inner = dims.hidden, dims.expert_inner
    for expert in range(experts):
        for name, rows, columns in (("w1", inner, wide), ("w2", wide, inner), ("w3", inner, wide)):
            yield _fp4(f"{prefix}experts.{expert}.{name}", rows, columns)
    for name, rows, columns in (("w1", inner, wide), ("w2", wide, inner), ("w3", inner, wide)):
        yield _fp8(f"{prefix}shared_experts.{name}", rows, columns)


def _engram(prefix: str, rows: int, dims: ModelDims) -> Iterator[Entry]:
    keys = (dims.engram_ngram - 1) * dims.engram_heads * dims.engram_dim
    yield _fp8(prefix + "engram.embed", rows, dims.engram_dim, block_rows=1)
    yield _fp8(prefix + "engram.wkv", (dims.streams + 1) * dims.hidden, keys)
    yield _bf16(prefix + "engram.q_weight", dims.streams, dims.hidden)
    yield _bf16(prefix + "engram.k_weight", dims.streams, dims.hidden)


def _draft_stage(stage: int, dims: ModelDims) -> Iterator[Entry]:
    prefix = f"mtp.{stage}."
    yield from _block(prefix, dims, dims.draft_experts)
    if stage == 0:
        yield _fp8(prefix + "main_proj", dims.hidden, dims.draft_stages * dims.hidden)
        yield _norm(prefix + "main_norm.weight", dims.hidden)
    if stage == dims.draft_stages - 1:
        yield _norm(prefix + "norm.weight", dims.hidden)
        yield _bf16(prefix + "markov_head.embed.weight", dims.vocab, dims.markov_rank)
        yield _bf16(prefix + "markov_head.head.weight", dims.vocab, dims.markov_rank)
        yield _bf16(prefix + "confidence_head.proj.weight", 1, dims.hidden + dims.markov_rank)


def _vision(dims: ModelDims) -> Iterator[Entry]:
    width, inner = dims.vision_dim, dims.vision_inner
    yield _bf16("vision.patch_embed.proj.weight", width, 3 * dims.patch**2)
    yield _bf16("vision.patch_embed.proj.bias", width)
    for block in range(dims.vision_layers):
        prefix = f"vision.blocks.{block}."
        for name, rows in (("wqkv", 3 * width), ("wo", width)):
            yield _bf16(f"{prefix}attn.{name}.weight", rows, width)
            yield _bf16(f"{prefix}attn.{name}.bias", rows)
        yield _bf16(prefix + "mlp.w1.weight", 2 * inner, width)
        yield _bf16(prefix + "mlp.w2.weight", width, inner)
        yield _norm(prefix + "norm1.weight", width)
        yield _norm(prefix + "norm2.weight", width)
    yield _norm("vision.norm.weight", width)
    for name, columns in (("w1", dims.downsample**2 * width), ("w2", dims.hidden)):
        yield _bf16(f"aligner.{name}.weight", dims.hidden, columns)
        yield _bf16(f"aligner.{name}.bias", dims.hidden)
    for name in ("image_start", "image_end", "image_newline"):
        yield _bf16(name, dims.hidden)


def _f32(name: str, *shape: int) -> Plain:
    return Plain(Tensor(name, "F32", shape))


def _bf16(name: str, *shape: int) -> Plain:
    return Plain(Tensor(name, "BF16", shape))


def _norm(name: str, width: int) -> Plain:
    return Plain(Tensor(name, "BF16", (width,)), center=1.0)


def _fp8(module: str, rows: int, columns: int, block_rows: int = 32) -> Quantized:
    scale = (-(-rows // block_rows), -(-columns // 32))
    return Quantized(
        Tensor(module + ".weight", "F8_E4M3", (rows, columns)),
        Tensor(module + ".scale", "F8_E8M0", scale),
        block_rows,
        "e4m3",
    )


def _fp4(module: str, rows: int, columns: int) -> Quantized:
    return Quantized(
        Tensor(module + ".weight", "I8", (rows, columns // 2)),
        Tensor(module + ".scale", "F8_E8M0", (rows, columns // 32)),
        1,
        "e2m1",
    )
