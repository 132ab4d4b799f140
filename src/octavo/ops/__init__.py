"""The operations. Each has a folder: `op` checks and dispatches, `reference` is plain PyTorch, `kernel` is Triton.

A CPU runs the reference, a GPU the kernels. Both give the same bytes.
"""

from octavo.ops.activation import (
    activation_backward,
    activation_quantize,
    activation_quantize_scaled,
    activation_scales,
)
from octavo.ops.attention import append_kv, cached_attention
from octavo.ops.gemm import Backend, find_backend, scaled_mm
from octavo.ops.norm import norm_backward, norm_quantize, norm_quantize_inference
from octavo.ops.quantization import quantize, quantize_scaled, quantize_stack, quantize_transposed, row_scales
from octavo.ops.requantization import requantize, requantize_norm, requantize_transposed
from octavo.ops.rotary import rotate_append
from octavo.ops.transposition import transpose

__all__ = [
    "Backend",
    "activation_backward",
    "activation_quantize",
    "activation_quantize_scaled",
    "activation_scales",
    "append_kv",
    "cached_attention",
    "find_backend",
    "norm_backward",
    "norm_quantize",
    "norm_quantize_inference",
    "quantize",
    "quantize_scaled",
    "quantize_stack",
    "quantize_transposed",
    "requantize",
    "requantize_norm",
    "requantize_transposed",
    "rotate_append",
    "row_scales",
    "scaled_mm",
    "transpose",
]
