"""Sampling from a language model, of ours or of transformers: p(next | tokens) = softmax(logits / temperature).

`top_k` restricts the draw to the k most likely tokens (Fan et al. 2018, arXiv:1805.04833). Temperature 0 takes the most
likely token.

A token may hold a part of a character: in UTF-8 a character has up to four bytes, and byte-level tokenizers cut between
them. Bytes that do not yet make a character decode to one U+FFFD at the end of the text, and the text before it does
not change when more bytes follow. So `stream` holds that U+FFFD back until the character is complete.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.kv_cache.model import ModelKVCache
from octavo.models.decoder import Decoder
from octavo.models.tokenizer import Tokenizer

_INCOMPLETE = "�"


def stream(
    model: nn.Module,
    tokenizer: Tokenizer,
    context: int,
    prompt: str,
    *,
    count: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
    stop: Collection[int] = (),
) -> Iterator[str]:
    """Yield the text that follows `prompt`, in pieces, for up to `count` tokens.

    Args:
        model, context, count, temperature, top_k, seed: see `generate`.
        tokenizer: of the model.
        prompt: text of at least one token.
        stop: tokens that end the text; they are not part of it.

    Raises:
        ValueError: an empty prompt, or a number out of range.
    """
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError("the prompt must hold at least one token, got an empty one: give some text to continue")
    start = torch.tensor([ids], device=next(model.parameters()).device)
    tokens = generate(model, start, count, context=context, temperature=temperature, top_k=top_k, seed=seed)
    return _decode(tokenizer, ids, tokens, stop)


def generate(
    model: nn.Module,
    tokens: Tensor,
    count: int,
    *,
    context: int,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int | None = None,
) -> Iterator[Tensor]:
    """Yield `count` next tokens, each int64 [B], after the prompt `tokens`, int64 [B, T] with T >= 1.

    The model is in evaluation mode until the iterator ends or is closed.

    Args:
        model: a model of ours or a causal language model of transformers.
        tokens: the prompt, on the device of the model.
        count: number of tokens.
        context: tokens that the model sees, at most. A longer text continues from its last context // 2 tokens as if
            they were the whole text: their positions count from 0, and the cache is rebuilt.
        temperature: 0 takes the most likely token.
        top_k: draw from the k most likely tokens; 0 draws from all.
        seed: of the draws; None takes a new one.

    Raises:
        ValueError: an argument out of range.
    """
    if tokens.ndim != 2 or tokens.dtype != torch.int64 or tokens.shape[1] < 1:
        raise ValueError(f"the prompt must be int64 [B, T] with T >= 1, got {tokens.dtype} {tuple(tokens.shape)}")
    limit = model.config.context if isinstance(model, Decoder) else context
    if not 2 <= context <= limit:
        raise ValueError(f"context must be from 2 to the model's {limit}, got {context}")
    if count < 0 or temperature < 0 or top_k < 0:
        raise ValueError(f"count, temperature and top_k must be 0 or more; got {count}, {temperature} and {top_k}")
    random = torch.Generator(tokens.device)
    random.seed() if seed is None else random.manual_seed(seed)
    return _generate(model, tokens, count, context, temperature, top_k, random)


@torch.inference_mode()
def _generate(
    model: nn.Module, window: Tensor, count: int, context: int, temperature: float, top_k: int, random: torch.Generator
) -> Iterator[Tensor]:
    was_training = model.training
    model.eval()
    try:
        cache, new = None, window
        for _ in range(count):
            if window.shape[1] > context:
                window = window[:, -(context // 2) :]
                cache, new = None, window
            logits, cache = _next_logits(model, new, cache, context)
            token = sample(logits, temperature, top_k, random)
            new = token[:, None]
            window = torch.cat((window, new), dim=1)
            yield token
    finally:
        model.train(was_training)


def _next_logits(model: Any, new: Tensor, cache: Any, context: int) -> tuple[Tensor, Any]:
    """The logits [B, V] after the tokens `new` [B, T], and the cache with these tokens; None starts an empty cache."""
    if isinstance(model, Decoder):
        cache = ModelKVCache(model.config.layers, context) if cache is None else cache
        return model(new, cache)[:, -1], cache
    output = model(input_ids=new, past_key_values=cache, use_cache=True)
    return output.logits[:, -1], output.past_key_values


def sample(logits: Tensor, temperature: float, top_k: int, random: torch.Generator) -> Tensor:
    """One token, int64 [B], for each row of logits [B, V]; a `top_k` of 0 or above V draws from all tokens."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits.float() / temperature
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=random)[:, 0]


def _decode(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterator[Tensor], stop: Collection[int]
) -> Iterator[str]:
    ids = list(prompt)
    shown = len(tokenizer.decode(ids))  # a tokenizer may drop a blank at the start of a text: decode prompt and all
    for token in tokens:
        if int(token) in stop:
            break
        ids.append(int(token))
        text = tokenizer.decode(ids)
        complete = len(text) - text.endswith(_INCOMPLETE)
        if complete > shown:
            yield text[shown:complete]
            shown = complete
    if rest := tokenizer.decode(ids)[shown:]:
        yield rest
