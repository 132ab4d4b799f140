"""A norm whose output is quantized as it is made, and its gradient."""

from octavo.ops.norm.op import Normed, norm_backward, norm_quantize

__all__ = ["Normed", "norm_backward", "norm_quantize"]
