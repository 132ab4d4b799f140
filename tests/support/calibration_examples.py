"""Tiny random models of every kind that is calibrated, as folders; and what they see when they run at once."""

import json
from pathlib import Path
from unittest import mock

import torch
import transformers
from packed_examples import lively
from safetensors.torch import save_file
from torch import Tensor, nn

from octavo.checkpoint.files import model_tensors
from octavo.models import GPT2, GPT2Config
from octavo.models.tokenizer import ByteTokenizer

_SIZES = {
    "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "max_position_embeddings": 40, "initializer_range": 0.3,
}  # fmt: skip
_GLU = _SIZES | {"num_key_value_heads": 2, "intermediate_size": 48, "tie_word_embeddings": True}
_WINDOW = {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1}
_BERT = _SIZES | {"intermediate_size": 48}
MODELS = {
    "llama": ("Llama", _GLU | {"tie_word_embeddings": False}),
    "mistral": ("Mistral", _GLU | {"sliding_window": 6}),
    "qwen2": ("Qwen2", _GLU | _WINDOW),  # its layers attend in two ways
    "qwen3": ("Qwen3", _GLU | {"head_dim": 16}),
    "gemma2": ("Gemma2", _GLU | {"head_dim": 16, "sliding_window": 6}),  # sdpa does not compute its softcap
    "opt": ("OPT", _SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 24}),
    "bert": ("Bert", _BERT),
    "bert masked": ("Bert", _BERT),
}


def write_model(path: Path, name: str, *, shards: str = "1GB", **change) -> Path:
    """The folder of one of MODELS in FP32, or of `gpt2` of ours."""
    torch.manual_seed(2)
    if name == "gpt2":
        ours = lively(GPT2(GPT2Config(256, 3, 32, 4, 40)))
        path.mkdir(parents=True)
        save_file(model_tensors(ours), path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(ours.config.to_hf()))
    else:
        kind, sizes = MODELS[name]
        config = getattr(transformers, f"{kind}Config")(**(sizes | change))
        suffix = {"bert": "Model", "bert masked": "ForMaskedLM"}.get(name, "ForCausalLM")
        lively(getattr(transformers, kind + suffix)(config)).save_pretrained(path, max_shard_size=shards)
    ByteTokenizer().save(path)
    return path


def write_data(path: Path) -> list[str]:
    """80 short prompts of many lengths, as the argument `data`."""
    rows = [{"text": f"{i} " * (1 + i % 20)} for i in range(80)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return [str(path)]


def whole_model(folder: Path):
    """The model in BF16, as transformers itself opens it."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(folder, dtype=torch.bfloat16).eval()


def watch_whole(model, batches) -> dict[str, list[Tensor]]:
    """What each linear layer reads and each norm writes (plain hooks), by batch; what sdpa gets, by batch and layer."""
    seen: dict[str, list[Tensor]] = {}

    def note(name: str, x: Tensor) -> None:
        seen.setdefault(name, []).append(x.detach().clone())

    def attend(*qkv: Tensor, sdpa=nn.functional.scaled_dot_product_attention, **settings) -> Tensor:
        for letter, x in zip("qkv", qkv, strict=False):
            note(f"attention.{letter}", x)
        return sdpa(*qkv, **settings)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, args, name=name: note(f"{name}.input", args[0]))
        if "Norm" in type(module).__name__:
            module.register_forward_hook(lambda _, args, out, name=name: note(f"{name}.output", out))
    with torch.no_grad(), mock.patch.object(nn.functional, "scaled_dot_product_attention", attend):
        for batch in batches:
            model(batch)
    return seen
