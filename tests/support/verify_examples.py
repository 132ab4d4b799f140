"""Folders to pack and to verify: tiny models of transformers with large outputs, text, and changes to their files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from octavo.evaluation import PromptOptions
from octavo.models.tokenizer import ByteTokenizer
from octavo.verification import verify
from octavo.verification.result import Report

SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 64,
    "eos_token_id": 0, "bos_token_id": None,
}  # fmt: skip
OPT = {"ffn_dim": 256, "word_embed_proj_dim": 128, "activation_function": "gelu"}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "opt": (OPTForCausalLM, OPTConfig, OPT),
    "bert": (BertModel, BertConfig, {}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, {}),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"query_pre_attn_scalar": 32, "sliding_window": 64}),
}


Damage = Callable[[Path], None]
"""Damages a folder."""


def make_model(folder: Path, name: str, seed: int = 0, **sizes: Any) -> Path:
    """A BF16 folder with a tokenizer."""
    architecture, configuration, settings = MODELS[name]
    torch.manual_seed(seed)
    model = architecture(configuration(**SIZES | settings | sizes))
    with torch.no_grad():
        for key, p in model.named_parameters():
            if p.ndim == 2 and "emb" not in key:
                p.copy_(torch.randn_like(p) * p.shape[1] ** -0.5)
            elif p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.1)
    model.bfloat16().save_pretrained(folder)
    ByteTokenizer().save(folder)
    return folder


def write_text(path: Path) -> Path:
    """Write a text with enough bytes for nine prompts of 64."""
    path.write_text(
        "\n".join(f"{i} times {j} is {i * j}, said the clerk to the clerk." for i in range(6) for j in "74")
    )
    return path


def run_verify(packed: Path, model: Path, text: Path, **options: Any) -> Report:
    """Verify with prompts of the text."""
    return verify(packed, model, [str(text)], prompts=PromptOptions(16, batch=4), **options)


def damaged(folder: Path, target: Path, damage: Damage) -> Path:
    """A copy of the folder, with damage."""
    shutil.copytree(folder, target)
    damage(target)
    return target


def expect(report: Report, kind: str, where: str, message: str) -> None:
    """The report has this finding and at most one more, and nothing was run."""
    findings = [str(finding) for finding in report.findings]
    assert any(f.kind == kind and f.where == where and message in f.message for f in report.findings), findings
    assert len(findings) <= 2, findings
    assert not report.ok
    assert report.not_run
    assert not report.readers


def change_config(folder: Path, **settings: Any) -> None:
    """Change settings in quantization_config; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    changed = config["quantization_config"] | settings
    config["quantization_config"] = {key: value for key, value in changed.items() if value is not None}
    path.write_text(json.dumps(config))


def change_tensors(folder: Path, change: Any) -> None:
    """Let `change` edit the dictionary of tensors in place."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
