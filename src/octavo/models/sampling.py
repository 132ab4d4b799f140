"""Sampling from a decoder: p(next | tokens) = softmax(logits / temperature), one token at a time.

`top_k` keeps the k most likely tokens (Fan et al. 2018, arXiv:1805.04833); temperature 0 takes the most likely.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.models.cache import KVCache
from octavo.models.decoder import Decoder


def generate(
    model: Decoder,
    tokens: Tensor,
    count: int,
    *,
    context: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
    use_cache: bool = True,
) -> Iterator[Tensor]:
    """Yield `count` next tokens, each int64 [B], after the prompt `tokens`, int64 [B, T] with T >= 1.

    The model sees at most `context` tokens. When there are more (in a long prompt too), it goes on from the last
    context // 2 as if they were the whole text, their positions counted from 0 and the cache rebuilt. With
    `use_cache=False` every step computes the same window anew: slower, and the check of the cache.

    `top_k` 0 keeps all tokens; `seed` None draws a new one. The model is in evaluation mode until the iterator ends or
    is closed. Raises ValueError for arguments out of range.
    """
    if tokens.ndim != 2 or tokens.dtype != torch.int64 or tokens.shape[1] < 1:
        raise ValueError(f"the prompt must be int64 [B, T] with T >= 1, got {tokens.dtype} {tuple(tokens.shape)}")
    if not 2 <= context <= model.config.context:
        raise ValueError(f"context must be from 2 to the model's {model.config.context}, got {context}")
    if count < 0 or temperature < 0 or top_k < 0:
        raise ValueError(f"count, temperature and top_k must be >= 0, got {count}, {temperature} and {top_k}")
    random = torch.Generator(tokens.device)
    if seed is None:
        random.seed()
    else:
        random.manual_seed(seed)
    return _stream(model, tokens, count, context, temperature, top_k, random, use_cache)


@torch.inference_mode()
def _stream(
    model: Decoder,
    window: Tensor,
    count: int,
    context: int,
    temperature: float,
    top_k: int,
    random: torch.Generator,
    use_cache: bool,
) -> Iterator[Tensor]:
    was_training = model.training
    model.eval()
    try:
        cache = KVCache(model.config.layers, context) if use_cache else None
        for _ in range(count):
            if window.shape[1] > context:
                window = window[:, -(context // 2) :]
                cache = KVCache(model.config.layers, context) if use_cache else None
            new = window if cache is None else window[:, cache.length :]
            token = sample(model(new, cache)[:, -1], temperature, top_k, random)
            window = torch.cat((window, token[:, None]), dim=1)
            yield token
    finally:
        model.train(was_training)


def sample(logits: Tensor, temperature: float, top_k: int, random: torch.Generator) -> Tensor:
    """One token, int64 [B], for each row of logits [B, V]; `top_k` above V keeps all."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=random)[:, 0]
