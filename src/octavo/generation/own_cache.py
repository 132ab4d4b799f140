"""Generation on transformers' own cache, for models whose attention `octavo.kv_cache` does not serve."""

import inspect
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from octavo.generation.engine import AUTO, Engine
from octavo.generation.forward import make_forward
from octavo.generation.loop import Choose, Stop, decode
from octavo.generation.prompts import Prompts, first_tokens
from octavo.kv_cache.model import Pairs, UnservedError


def open_engine(
    model: Any,
    *,
    context: int,
    tokens: int,
    kv_cache: str = AUTO,
    kv_scales: Pairs | None = None,
    attention: str = "bf16",
) -> Engine:
    """An engine for texts of up to `tokens` tokens.

    With `kv_cache="auto"`, transformers' own cache serves models and lengths that ours does not: a text longer than the
    sliding window of the model, for example.

    Args:
        model, context, kv_cache, kv_scales, attention: see `Engine`.
        tokens: of the longest text, its prompt included. It may exceed the context.

    Raises:
        UnservedError: our cache does not serve the attention of the model, and `kv_cache` asks for it.
        ValueError: the dtype is unknown, or the scales do not fit.
    """
    engine = Engine(model, context=context, kv_cache=kv_cache, kv_scales=kv_scales, attention=attention)
    try:
        make_forward(model, 1, engine.dtype, engine.scales)
    except UnservedError:
        if engine.asked:
            raise
        return OwnCacheEngine(model, context=context)
    enough = engine.asked or engine.limit >= min(context, tokens)
    return engine if enough else OwnCacheEngine(model, context=context)


class OwnCacheEngine(Engine):
    """An engine whose keys and values are in the cache that a model of transformers makes for itself."""

    def __init__(self, model: Any, *, context: int) -> None:
        super().__init__(model, context=context)
        self.limit = context
        self.takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def _compile(self, prompts: Prompts, new: int) -> None:
        """Nothing: kernels are compiled when the first call launches them."""

    @torch.no_grad()
    def run(
        self, prompts: Prompts, new: int, choose: Choose, stop: Stop | None, *, watched: bool, piece: int | None = None
    ) -> Generator[tuple[Tensor, Tensor | None], None, None]:
        """As `Engine.run`, without pieces: a prompt is one forward pass."""
        begin = prompts.ids.shape[1]
        self.check_length(begin, new)
        mask = torch.arange(begin + new, device=prompts.ids.device) >= first_tokens(prompts)[:, None]
        cache: Any = None
        end = 0

        def forward(tokens: Tensor) -> Tensor:
            nonlocal cache, end
            start, end = end, end + tokens.shape[1]
            padded = {"attention_mask": mask[:, :end].long()} if any(prompts.padding) else {}
            if padded and self.takes_positions:
                padded["position_ids"] = (padded["attention_mask"].cumsum(1) - 1).clamp(min=0)[:, start:]
            output = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, **padded)
            cache = output.past_key_values
            logits: Tensor = output.logits
            return logits[:, -1]

        logits = forward(prompts.ids)
        yield from decode(prompts.ids, new, logits, choose, lambda t: forward(t[:, None]), stop, watched)
