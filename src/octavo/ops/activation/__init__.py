"""Activations with a quantized output, and their quantized gradients."""

from octavo.ops.activation.op import (
    ActivationGradient,
    activation_backward,
    activation_quantize,
    activation_quantize_scaled,
    activation_scales,
)

__all__ = [
    "ActivationGradient",
    "activation_backward",
    "activation_quantize",
    "activation_quantize_scaled",
    "activation_scales",
]
