"""Small decoders of transformers, trained or packed, and their outputs."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import StaticCache

from octavo.inference.packed_linear import PackedLinear
from octavo.inference.transformers_cache import CACHE

SIZES = {
    "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
}


def make_decoder(name: str, **more: Any) -> Any:
    """A model in float32 whose norms and biases are far from ones and zeros."""
    torch.manual_seed(0)
    kind, settings = ARCHITECTURES[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES | settings | more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(p + torch.randn_like(p) * 0.3 if p.ndim == 1 else p if "embed" in key else 4 * p)
    return model


def make_model(name: str) -> Any:
    """A model for evaluation whose parameters are BF16 numbers."""
    model = make_decoder(name).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    return model


def tokens(length: int = 21, vocabulary: int = 99) -> Tensor:
    return torch.randint(0, vocabulary, (2, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Any, ids: Tensor | None = None) -> Tensor:
    found: Tensor = model(tokens() if ids is None else ids).logits
    return found


class Doubled(nn.Module):
    """What a library puts in the place of a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)  # type: ignore[no-any-return]


def layer_by_layer(model: nn.Module) -> nn.Module:
    """A copy that runs unfused, because of its hooks."""
    reference = copy.deepcopy(model)
    for module in reference.modules():
        if isinstance(module, nn.Linear | PackedLinear):
            module.register_forward_hook(lambda *_: None)
    return reference


def static_steps(model: Any, run: Callable[..., Any]) -> Tensor:
    """Logits of a prompt and of three tokens after it, with a static cache."""
    cache = StaticCache(config=model.config, max_cache_len=16)
    ids, found = tokens(8).to(model.device), []
    with torch.no_grad():
        for begin, end in ((0, 5), (5, 6), (6, 7), (7, 8)):
            found.append(run(ids[:, begin:end], **{CACHE: cache}, use_cache=True).logits)
    return torch.cat(found, 1)
