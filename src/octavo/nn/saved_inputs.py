"""The layers after attention, whose input PyTorch's attention saves for its own backward pass.

Such a layer saves its input too, instead of the bytes that it makes of it. That takes no memory, since both save one
tensor, and the backward pass casts it again. In compiled code the partitioner would save the bytes: it does not know
that they are computed from a tensor that is saved anyway.
"""

from typing import Any

from torch import nn

from octavo.nn.diffusers_fusion import is_plain_attention
from octavo.nn.linear import Linear
from octavo.nn.module_class import class_name, library_of

# Attentions of transformers that multiply the result of PyTorch's attention by `o_proj`, and nothing else.
TRANSFORMERS = tuple(
    f"{name}Attention" for name in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe")
)
FUNCTIONS = ("sdpa", "flash_attention_2", "flash_attention_3")  # of transformers, that save their result


def mark_saved_inputs(model: nn.Module) -> None:
    """Tell the converted layers after attention in `model` whether it saves their input."""
    for module in model.modules():
        name = _layer_after(module)
        layer = module.get_submodule(name) if name else None
        if isinstance(layer, Linear):
            layer.input_is_saved = _saves_output(module)


def _layer_after(attention: Any) -> str:
    """The name of the layer whose input is the result of PyTorch's attention in `attention`; "" for other modules."""
    name, library = class_name(attention), library_of(attention)
    if library == "timm" and name == "Attention":
        changed = type(attention.norm) is not nn.Identity or getattr(attention, "gate", None) is not None
        return "" if changed else "proj"
    if library == "transformers" and name in TRANSFORMERS:
        return "o_proj"
    if is_plain_attention(attention):  # of diffusers
        return "to_out.0"
    ours: str = getattr(attention, "layer_after", "")  # in `octavo.models`
    return ours


def _saves_output(attention: Any) -> bool:
    """Whether the attention saves its result in the dtype of the next layer's input."""
    if getattr(attention, "fp8_gradients", None) is not None:
        return False
    if library_of(attention) == "transformers":
        return attention.config._attn_implementation in FUNCTIONS
    fused: bool = getattr(attention, "fused_attn", True)  # in timm
    return fused
