"""The outputs that quality is measured on: the logits of a model that predicts tokens, else the last hidden states."""

from typing import Any

from torch import Tensor

from octavo.hf.inputs import arguments_of, has_decoder
from octavo.models.decoder import Decoder


def model_outputs(model: Any, inputs: Tensor, logits: bool, **options: Any) -> Tensor:
    """Run a model on its main input.

    Args:
        model: of `octavo.models` or of transformers.
        inputs: token ids int64 [B, T], images [B, channels, height, width], or spectrograms [B, bands, frames].
        logits: whether its outputs are logits, see `predicts_tokens`.
        options: further arguments of the model.

    Returns:
        Logits float32 [B, T, V]; of another model its last hidden states float32, such as [B, T, width]. A model with
        an encoder and a decoder gives those of its decoder, for the same tokens.
    """
    part = measured_part(model, logits)
    result = part(inputs, **options) if isinstance(model, Decoder) else part(**arguments_of(model, inputs), **options)
    if isinstance(result, Tensor):
        return result.float()
    hidden = None if logits else getattr(result, "last_hidden_state", None)
    chosen: Tensor = result.logits if hidden is None else hidden  # some classifiers have no part below their head
    return chosen.float()


def measured_part(model: Any, logits: bool) -> Any:
    """The module whose outputs are measured: the model, or without `logits` the part below its head."""
    return model if logits else getattr(model, "base_model", model)


def is_language_model(model: Any) -> bool:
    """Whether a model predicts the next token of its input: any of `octavo.models`, and of transformers by the name of
    its class.

    The model needs no weights. Training, which has them, asks `octavo.models.causal.is_causal` instead.
    """
    if isinstance(model, Decoder):
        return True
    named = (*(model.config.architectures or ()), type(model).__name__)[0]
    return names_language_model(named)


def names_language_model(architecture: str) -> bool:
    """Whether a class of transformers, such as "LlamaForCausalLM", predicts the next token."""
    return architecture.endswith(("ForCausalLM", "LMHeadModel"))


def predicts_tokens(model: Any) -> bool:
    """Whether a model gives logits of tokens: a language model, or an encoder and a decoder with an output head."""
    return is_language_model(model) or (has_decoder(model) and model.get_output_embeddings() is not None)
