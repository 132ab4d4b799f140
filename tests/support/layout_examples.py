"""Tiny decoders of transformers with their calibrations and packings, made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from octavo.calibration import calibrate
from octavo.evaluation import PromptOptions
from octavo.models.tokenizer import ByteTokenizer
from octavo.packing import pack

SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64, "eos_token_id": 0,
    "bos_token_id": None,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 32},
    "OPT": {"ffn_dim": 256, "word_embed_proj_dim": 128},
}
Folders = Callable[..., Path]
ATTENTION = "model.layers.1.self_attn"


def folder_maker(root: Path) -> Folders:
    """A function make: make(kind) is a model, make(kind, "calibrated") its calibration, make(kind, scheme=...) a
    packing."""
    (root / "text.txt").write_text(
        "\n\n".join(f"{i} times {j} is {i * j}, said the clerk." for i in range(9) for j in range(9))
    )

    def make(kind: str, what: str = "", **how: Any) -> Path:
        folder = root / " ".join([kind, what, *(f"{key}={value}" for key, value in how.items())]).strip()
        if folder.exists():
            return folder
        if how:
            pack(make(kind), folder, calibration=make(kind, "calibrated"), **how)
        elif what:
            calibrate(make(kind), [str(root / "text.txt")], folder, prompts=PromptOptions(16, 32))
        else:
            torch.manual_seed(0)
            config = getattr(transformers, f"{kind}Config")(**SIZES | KINDS[kind])
            model = getattr(transformers, f"{kind}ForCausalLM")(config)
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5 if p.ndim == 2 and "emb" not in name else p)
            model.bfloat16().save_pretrained(folder)
            ByteTokenizer().save(folder)
        return folder

    return make


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


IDS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def logits(model: nn.Module, **how: Any) -> Tensor:
    out: Any = model(IDS, **how)
    return (out if isinstance(out, Tensor) else out.logits).double()


def same_bytes(a: Path, b: Path) -> bool:
    first, second = (load_file(folder / "model.safetensors") for folder in (a, b))
    return first.keys() == second.keys() and all(
        t.dtype == second[name].dtype
        and t.shape == second[name].shape
        and torch.equal(t.reshape(-1).view(torch.uint8), second[name].reshape(-1).view(torch.uint8))
        for name, t in first.items()
    )


# ---- modelopt and autofp8
