"""The forward pass of a model of transformers over a cache of fixed size. Importing this imports transformers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from octavo.kv_cache.model import Pairs, UnservedError
from octavo.kv_cache.transformers_attention import ATTENTION
from octavo.kv_cache.transformers_cache import QuantizedKVCache


class TransformersForward:
    """A causal language model of transformers with a cache.

    Raises:
        UnservedError: the attention of the model is of a kind that the cache does not serve.
        ValueError: the scales do not fit.
    """

    def __init__(self, model: Any, max_tokens: int, dtype: str | None, scales: Pairs | None) -> None:
        if model.config.is_encoder_decoder or not model._supports_attention_backend:
            raise UnservedError(f"{type(model).__name__} does not take an attention from outside")
        if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
            raise UnservedError(f"{type(model).__name__} has attention sinks, which the cache does not serve")
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        self.passed = QuantizedKVCache(model.config, max_tokens, dtype, scales=scales, warm_up="manual")
        self.cache = self.passed.model_cache
        self.keep = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}

    def __call__(self, tokens: Tensor) -> Tensor:
        # transformers passes a mask of four dimensions on as it is; the attention "octavo" reads it as first tokens.
        first = None if self.cache.first is None else self.cache.first.view(-1, 1, 1, 1)
        with _octavo_attention(self.config):
            output = self.model(
                input_ids=tokens,
                attention_mask=first,
                position_ids=self.cache.positions(tokens),
                past_key_values=self.passed,
                use_cache=True,
                **self.keep,
            )
        logits: Tensor = output.logits
        return logits[:, -1]


@contextmanager
def _octavo_attention(config: Any) -> Iterator[None]:
    """The attention of the model is "octavo"."""
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before
