"""Decoders of `tiny_models`, trained or packed, and their outputs."""

import copy

import torch
from torch import Tensor, nn
from transformers import StaticCache

from octavo.inference.packed_linear import PackedLinear
from octavo.inference.transformers_cache import CACHE

ARCHITECTURES = ("llama", "llama with biases", "mistral", "qwen2", "qwen3")  # of `tiny_models`, fused where they run


def tokens(length: int = 21, vocabulary: int = 99) -> Tensor:
    return torch.randint(0, vocabulary, (2, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, ids: Tensor | None = None) -> Tensor:
    return model(tokens() if ids is None else ids).logits


class Doubled(nn.Module):
    """What a library puts in the place of a layer, whose layers it shows as its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._modules |= inner._modules | {"inner": inner}

    def forward(self, *args, **kwargs):
        y = self.inner(*args, **kwargs)
        return 2 * y if isinstance(y, Tensor) else (2 * y[0], *y[1:])


def layer_by_layer(model: nn.Module) -> nn.Module:
    """A copy that runs unfused, because of its hooks."""
    reference = copy.deepcopy(model)
    for module in reference.modules():
        if isinstance(module, nn.Linear | PackedLinear):
            module.register_forward_hook(lambda *_: None)
    return reference


def static_steps(model, run) -> Tensor:
    """Logits of a prompt and of three tokens after it, with a static cache."""
    cache = StaticCache(config=model.config, max_cache_len=16)
    ids, found = tokens(8).to(model.device), []
    with torch.no_grad():
        for begin, end in ((0, 5), (5, 6), (6, 7), (7, 8)):
            found.append(run(ids[:, begin:end], **{CACHE: cache}, use_cache=True).logits)
    return torch.cat(found, 1)
