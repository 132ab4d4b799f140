"""The precision of the causal attention of a model in training."""

from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.quantized_attention import SHORTEST, GradientScales, attend_fp8
from octavo.nn.saved_inputs import mark_saved_inputs
from octavo.ops import fp8_attention_limit

NAME = "octavo_fp8"  # of the attention, in transformers


def use_fp8_attention(
    model: nn.Module, *, shortest: int = SHORTEST, device: torch.device | str | None = None
) -> list[str]:
    """Compute the causal attention of `model` in E4M3, forward and backward, in place.

    It saves q, k, v and the result in a byte an element for the backward pass. `octavo.nn.quantized_attention` has its
    arithmetic. Attention with dropout, with a mask (padding), over a cache, or on a GPU over a length that is not a
    multiple of 128 stays in BF16. The recipe of the linear layers does not matter, and neither does the order with
    `octavo.convert`.

    Args:
        model: a language model of `octavo.models` or of transformers.
        shortest: tokens of the shortest text whose attention runs in E4M3; shorter texts are faster in BF16.
        device: where the model will run; by default the device of its weights. A CPU computes the same in float32.

    Returns:
        The names of the attention modules.

    Raises:
        ValueError: the model has no causal attention that can be replaced, or the GPU, its libraries or the head size
            do not have FP8 attention.

    Example:

        octavo.convert(model, "rowwise")
        octavo.nn.use_fp8_attention(model)
    """
    found: dict[str, Any] = {name: module for name, module in model.named_modules() if _is_causal_attention(module)}
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no causal attention that octavo can compute in FP8: it must be a language "
            "model of octavo.models, or one of transformers that takes an attention (set_attn_implementation)"
        )
    weight = next(model.parameters())
    place = weight.device if device is None else torch.device(device)
    for name, module in found.items():
        if place.type == "cuda" and (limit := fp8_attention_limit(place, module.head_dim)):
            raise ValueError(f"{name}: {limit}. Leave attention in BF16")
    for module in found.values():
        module.fp8_gradients = GradientScales(weight.device, shortest)
    if _is_transformers(model):
        _register()
        transformer: Any = model
        transformer.set_attn_implementation(NAME)
    mark_saved_inputs(model)
    return list(found)


def use_bf16_attention(model: nn.Module) -> None:
    """Undo `use_fp8_attention`."""
    modules: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "fp8_gradients", None), GradientScales)]
    for module in modules:
        module.fp8_gradients = None
    if modules and _is_transformers(model):
        transformer: Any = model
        transformer.set_attn_implementation("sdpa")
    mark_saved_inputs(model)


def _is_causal_attention(module: nn.Module) -> bool:
    """Whether `module` is an attention of ours, which reads `fp8_gradients`, or a causal one of transformers."""
    if hasattr(module, "fp8_gradients"):
        return True
    named = type(module).__name__.endswith("Attention") and hasattr(module, "head_dim") and hasattr(module, "config")
    return named and getattr(module, "is_causal", False) is True


def _is_transformers(model: nn.Module) -> bool:
    return bool(getattr(model, "_supports_attention_backend", False)) and hasattr(model, "set_attn_implementation")


def _register() -> None:
    """Register the attention, and PyTorch's mask for it, in transformers."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls; returns [B, T, H, D]. transformers computes the calls that stay in BF16."""
    gradients: GradientScales | None = getattr(module, "fp8_gradients", None)
    others = (kwargs.get(name) for name in ("softcap", "s_aux", "position_bias", "cache"))
    plain = attention_mask is None and kwargs.get("is_causal") is not False and all(each is None for each in others)
    if gradients is not None and plain and gradients.takes(query, key, dropout):
        return attend_fp8(query, key, value, gradients, scale=scaling).transpose(1, 2), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    result: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return result
