"""Norms with a quantized output, and their gradients."""

from octavo.ops.norm.op import Normed, norm_backward, norm_quantize

__all__ = ["Normed", "norm_backward", "norm_quantize"]
