"""A Mixtral of transformers with large outputs, and its folder packed with its experts."""

from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from octavo.packing import pack

SIZES = {
    "vocab_size": 99, "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 64, "num_local_experts": 4,
}  # fmt: skip


def packed_mixtral(root: Path, scheme: str = "channel") -> tuple[MixtralForCausalLM, Path]:
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES)).eval()
    for p in model.parameters():  # and not the rotary frequencies
        p.data = (p + torch.randn_like(p) * 0.2 if p.ndim == 1 else p * 2).detach().bfloat16()
    model.save_pretrained(root / "model")
    layout = "fp8" if scheme == "block" else "compressed-tensors"
    pack(root / "model", root / "packed", experts=True, scheme=scheme, layout=layout)
    return model, root / "packed"
