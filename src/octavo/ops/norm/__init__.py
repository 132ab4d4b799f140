"""Norms with a quantized output, and their gradients."""

from octavo.ops.norm.op import Normed, norm_backward, norm_quantize, norm_quantize_inference

__all__ = ["Normed", "norm_backward", "norm_quantize", "norm_quantize_inference"]
