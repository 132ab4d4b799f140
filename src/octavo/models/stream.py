"""Text from a language model, as it comes.

A token may hold a part of a character: in UTF-8 a character has up to four bytes, and byte-level tokenizers cut between
them. The bytes that do not yet make a character decode to one U+FFFD at the end of the text, and nothing before that
changes when more follow; so that one is held back until it is settled.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.models.decoder import Decoder
from octavo.models.sampling import generate, sample
from octavo.models.tokenizer import Tokenizer

UNSETTLED = "�"


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
        model, tokenizer: a model of ours, or of transformers.
        context: tokens that the model may see.
        temperature: 0 takes the most likely token.
        top_k: draw from the k most likely tokens; 0 from all.
        seed: of the draws; None takes a new one.
        stop: tokens that end the text, not shown themselves.

    Raises:
        ValueError: an empty prompt, or a number out of range.
    """
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError("the prompt must hold at least one token, got an empty one: give some text to go on from")
    if count < 0 or temperature < 0 or top_k < 0:
        raise ValueError(f"count, temperature and top_k must be >= 0, got {count}, {temperature} and {top_k}")
    device = next(model.parameters()).device
    start = torch.tensor([ids], device=device)
    if isinstance(model, Decoder):
        tokens = generate(model, start, count, context=context, temperature=temperature, top_k=top_k, seed=seed)
    else:
        random = torch.Generator(device)
        random.seed() if seed is None else random.manual_seed(seed)
        tokens = _transformers_tokens(model, start, count, context, temperature, top_k, random)
    return _text(tokenizer, ids, tokens, stop)


@torch.inference_mode()
def _transformers_tokens(
    model: Any, window: Tensor, count: int, context: int, temperature: float, top_k: int, random: torch.Generator
) -> Iterator[Tensor]:
    """What `octavo.models.sampling` does, for a model of transformers, which brings its own cache."""
    cache, new = None, window
    for _ in range(count):
        if window.shape[1] > context:
            window = window[:, -(context // 2) :]
            cache, new = None, window
        out = model(input_ids=new, past_key_values=cache, use_cache=True)
        token = sample(out.logits[:, -1], temperature, top_k, random)
        cache, new = out.past_key_values, token[:, None]
        window = torch.cat((window, new), dim=1)
        yield token


def _text(
    tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterator[Tensor], stop: Collection[int]
) -> Iterator[str]:
    ids = list(prompt)
    shown = len(tokenizer.decode(ids))  # with the prompt, since a tokenizer may drop a blank that opens a text
    for token in tokens:
        if int(token) in stop:
            break
        ids.append(int(token))
        text = tokenizer.decode(ids)
        settled = len(text) - text.endswith(UNSETTLED)
        if settled > shown:
            yield text[shown:settled]
            shown = settled
    if rest := tokenizer.decode(ids)[shown:]:
        yield rest
