"""Serve a tiny fp8 model with vLLM before and after conversion, by every loader, and compare what it says.

    python scripts/check_vllm.py FOLDER

Wants vLLM beside this project: its build for the processor is enough. Writes a checkpoint of random weights (two
layers, compressed-tensors, a scale for each row, powers of two so that the output has a sidecar), converts it, and lets
vLLM generate from the source and from the output: with vLLM's own loader, without an index, with the streaming
loader where it is installed, and with this project's load format. Tokens and log-probabilities must be the source's.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file

from deepinfer_prep import convert_checkpoint

PROMPT = [1, 5, 9, 200, 17]
NEW_TOKENS = 12
MODEL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**FP8, "strategy": "channel", "dynamic": False},
            "input_activations": {**FP8, "strategy": "token", "dynamic": True},
        }
    },
}

Generated = tuple[list[int], list[float]]


def write_source(folder: Path) -> None:
    """A Qwen3 model of random weights in two shards with an index."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**MODEL)
    model: torch.nn.Module = Qwen3ForCausalLM(config)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in model.to(torch.bfloat16).state_dict().items():
        if name.endswith("proj.weight"):
            values = weight.float()
            scale = torch.exp2(torch.ceil(torch.log2(values.abs().amax() / 448)))
            tensors[name] = (values / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale"] = scale.repeat(values.shape[0], 1)
        else:
            tensors[name] = weight.contiguous()
    names = sorted(tensors)
    shards = (names[: len(names) // 2], names[len(names) // 2 :])
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number, members in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensors[name] for name in members}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(members, file)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    described = config.to_dict() | {"architectures": ["Qwen3ForCausalLM"], "quantization_config": QUANTIZATION}
    _write_json(folder / "config.json", described)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, default=str), encoding="utf-8")


def generate(folder: Path, load_format: str) -> Generated:
    """Tokens and log-probabilities that vLLM generates greedily from a folder."""
    from vllm import LLM, SamplingParams

    model = LLM(
        model=str(folder),
        load_format=load_format,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        dtype="bfloat16",
    )
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, detokenize=False, logprobs=1)
    answer = model.generate([{"prompt_token_ids": PROMPT}], sampling)[0].outputs[0]
    tokens = list(answer.token_ids)
    return tokens, [step[token].logprob for token, step in zip(tokens, answer.logprobs, strict=True)]


def generate_apart(folder: Path, load_format: str) -> Generated:
    """The same in a process of its own: vLLM gives memory and threads back by ending."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(generate, (folder, load_format))


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=False))
def main(folder: Path) -> None:
    """Compare vLLM's answers before and after conversion; exit status 1 if one differs."""
    if importlib.util.find_spec("vllm") is None:
        raise click.ClickException("vLLM is not installed here; install a build of it for the processor first.")
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    source, output, without_index = (folder / name for name in ("source", "output", "output-without-index"))
    write_source(source)
    convert_checkpoint(source, output)
    shutil.copytree(output, without_index)
    (without_index / "model.safetensors.index.json").unlink()
    runs = [(output, "auto"), (without_index, "auto"), (output, "deepinfer_prep")]
    if importlib.util.find_spec("runai_model_streamer") is not None:
        runs += [(output, "runai_streamer"), (without_index, "runai_streamer")]
    expected = generate_apart(source, "auto")
    print(f"source, load format auto: tokens {expected[0]}", flush=True)
    same = []
    for path, load_format in runs:
        same.append(generate_apart(path, load_format) == expected)
        print(f"{'same' if same[-1] else 'DIFFERENT'}: {path.name}, load format {load_format}", flush=True)
    sys.exit(0 if all(same) else 1)


if __name__ == "__main__":
    main()
