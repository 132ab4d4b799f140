"""The outputs that quality is measured on: the logits of a language model, the last hidden states of an encoder."""

from typing import Any

from torch import Tensor

from octavo.models.decoder import Decoder


def model_outputs(model: Any, ids: Tensor, causal: bool, **options: Any) -> Tensor:
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
    """Whether a model predicts the next token: any of `octavo.models`, and of transformers by the name of its class.

    The model needs no weights. Training, which has them, asks `octavo.models.causal.is_causal` instead.
    """
    if isinstance(model, Decoder):
        return True
    named = (*(model.config.architectures or ()), type(model).__name__)[0]
    return names_language_model(named)


def names_language_model(architecture: str) -> bool:
    """Whether a class of transformers, such as "LlamaForCausalLM", predicts the next token."""
    return architecture.endswith(("ForCausalLM", "LMHeadModel"))
