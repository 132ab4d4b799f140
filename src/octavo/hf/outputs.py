"""The outputs that quality is measured on: the logits of a language model, the last hidden states of an encoder."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from octavo.hf.source import Source
from octavo.models.decoder import Decoder


def outputs(model: Any, ids: Tensor, causal: bool, **options: Any) -> Tensor:
    """Run a model on token ids.

    Args:
        model: of `octavo.models` or of transformers.
        ids: int64 [B, T].
        causal: whether it is a language model, see `is_language_model`.
        options: further arguments of the model.

    Returns:
        Logits float32 [B, T, V]; for an encoder, its last hidden states float32 [B, T, width].
    """
    result = model(ids, **options) if causal else getattr(model, "base_model", model)(ids, **options)
    if isinstance(result, Tensor):
        return result.float()
    chosen: Tensor = result.logits if causal else result.last_hidden_state
    return chosen.float()


def is_language_model(model: Any) -> bool:
    """Whether a model of transformers predicts the next token, by the name of its class; it needs no weights.

    Training, which has the weights, asks `octavo.models.causal.is_causal` instead.
    """
    named = (*(model.config.architectures or ()), type(model).__name__)[0]
    return bool(named.endswith(("ForCausalLM", "LMHeadModel")))


def gives_logits(source: Source) -> bool:
    """Whether the model of `source` is a language model: from `octavo.models`, or from transformers and not an encoder."""
    return isinstance(source.meta_model.model, Decoder) or is_language_model(source.meta_model.model)
