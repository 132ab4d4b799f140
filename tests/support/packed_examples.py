"""Small models, and runs of them written by hand as the trainer writes them."""

import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.weak import WeakIdRef
from transformers import Qwen2Config, Qwen2ForCausalLM

from octavo.inference.opening import load_packed
from octavo.models import GPT2, GPT2Config, Llama, LlamaConfig
from octavo.models.tokenizer import ByteTokenizer
from octavo.packing.packer import PackReport
from octavo.train.config import Config

LLAMA = {"vocabulary": 256, "layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "mlp_width": 96, "context": 48}
QWEN = {
    "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 48, "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Example:
    """A run, its model in FP32, and its packed folder."""

    run: Path
    model: nn.Module
    packed: Path
    report: PackReport


def lively(model: nn.Module) -> nn.Module:
    """The model with weights that make its logits large, biases not zero, and rows of very different size."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "emb" not in name and "lm_head" not in name and ".w" in name:
                size = torch.logspace(-1.5, 0.5, parameter.shape[0])[torch.randperm(parameter.shape[0])]
                parameter.copy_(torch.randn_like(parameter) * size[:, None] * parameter.shape[1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def examples() -> dict[str, tuple[nn.Module, dict, dict]]:
    """Name -> the model, its config.json, and the settings of its run."""
    torch.manual_seed(0)
    llama, untied = Llama(LlamaConfig(**LLAMA)), Llama(LlamaConfig(**LLAMA, tied=False))
    gpt2 = GPT2(GPT2Config(256, 2, 64, 4, 48))
    qwen = Qwen2ForCausalLM(Qwen2Config(**QWEN))
    described = qwen.config.to_dict() | {"architectures": ["Qwen2ForCausalLM"], "torch_dtype": "float32"}
    return {
        "llama": (lively(llama), llama.config.to_hf(), {}),
        "llama untied": (lively(untied), untied.config.to_hf(), {"skip": ("*.down_proj",)}),
        "gpt2": (lively(gpt2), gpt2.config.to_hf(), {"model": "gpt2"}),
        "qwen2": (lively(qwen), described, {"model": "/a/folder/that/is/gone", "recipe": "bf16"}),
    }


def write_run(path: Path, model: nn.Module, hf: dict, /, step: int = 7, **settings) -> Path:
    """A run's folder, as octavo.checkpoint.folder describes it."""
    (path / "model").mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(Config(**settings).to_dict()))
    (path / "model" / "config.json").write_text(json.dumps(hf))
    ByteTokenizer().save(path / "model")
    checkpoint = path / f"step-{step:08d}"
    checkpoint.mkdir()
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, checkpoint / "model.safetensors")
    return path


def load_float32(folder: Path) -> nn.Module:
    """The packed model. All that is not packed is in float32, so that only the order of sums rounds."""
    model = load_packed(folder).model
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    return model


@contextmanager
def small_shards(size: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.checkpoint.files.SHARD_BYTES", size)
        yield


def most_alive(monkeypatch: pytest.MonkeyPatch, readers: list[type], ends: str = "") -> list[int]:
    """A list of one number: how many tensors whose names end so are alive when `get` of `readers` is called."""
    alive, most = [], [0]
    for cls in readers:

        def counted(self, name, get=cls.get):
            alive[:] = [t for t in alive if t() is not None]
            tensor = get(self, name)
            if name.endswith(ends):
                most[0] = max(most[0], len(alive))
                alive.append(WeakIdRef(tensor))
            return tensor

        monkeypatch.setattr(cls, "get", counted)
    return most
