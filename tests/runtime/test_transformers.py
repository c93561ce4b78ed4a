"""transformers: a config, a model on meta, load_weights, generate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from deepinfer_prep.convert import convert_checkpoint
from deepinfer_prep.runtime import gemm
from deepinfer_prep.runtime.load import load_weights
from tests.small_files import Tensor, write_config, write_file

transformers = pytest.importorskip("transformers")

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


class Fp8Linear(nn.Module):
    """What a host puts in the place of a linear layer whose weight is fp8."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=E4M3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gemm.linear_qdq(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


def config() -> transformers.LlamaConfig:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64}
    return transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)


def fp8_source(folder: Path) -> dict[str, torch.Tensor]:
    """A Llama in 32x32 blocks as a checkpoint, and the values of all its tensors."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config()).to(BF16)
    tensors: dict[str, Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        if "_proj" not in name:
            tensors[name] = ("BF16", tuple(value.shape), value.view(torch.uint8).numpy().tobytes())
            values[name] = value.float()
            continue
        codes = (value.float() * 2**12).to(E4M3)
        grid = tuple(size // 32 for size in value.shape)
        tensors[name] = ("F8_E4M3", tuple(value.shape), codes.view(torch.uint8).numpy().tobytes())
        tensors[f"{name}_scale_inv"] = ("F8_E8M0", grid, 127 - 12)
        values[name] = codes.float() / 2**12
    write_file(folder / "model.safetensors", tensors, {"format": "pt"})
    write_config(folder, quant_method="fp8", weight_block_size=[32, 32], scale_fmt="ue8m0")
    return values


def load(folder: Path) -> nn.Module:
    """The four steps that the documentation shows."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config()).to(BF16).eval()
        for path, module in list(model.named_modules()):
            if path.endswith("_proj"):
                model.set_submodule(path, Fp8Linear(*module.weight.shape))
    report = load_weights(model, folder, rename=lambda name: None if name.endswith("_scale_inv") else name)
    assert set(report.left_on_meta) == {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"}
    model.model.rotary_emb = type(model.model.rotary_emb)(config())
    return model


def test_a_prepared_checkpoint_is_loaded_and_generates(tmp_path: Path) -> None:
    values = fp8_source(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "out")
    model = load(tmp_path / "out")
    reference = transformers.LlamaForCausalLM(config()).eval()
    reference.load_state_dict({**values, "lm_head.weight": values["model.embed_tokens.weight"]})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokens = torch.tensor([[3, 14, 15, 9, 26]])
    with torch.no_grad():
        found, expected = model(tokens).logits.float(), reference(tokens).logits
    assert float((found - expected).norm() / expected.norm()) < 0.05
    generated = model.generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, 9)
    assert torch.equal(generated[:, :5], tokens)
