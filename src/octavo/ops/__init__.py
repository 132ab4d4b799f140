"""How it is computed. One folder an operation: its door, its reference twin (which is the CPU's path), its kernels."""

from octavo.ops.activation import activation_backward, activation_quantize
from octavo.ops.attention import append_kv, cached_attention
from octavo.ops.gemm import Backend, find_backend, scaled_mm
from octavo.ops.norm import norm_backward, norm_quantize
from octavo.ops.quantization import quantize, quantize_both, quantize_scaled, quantize_stack, quantize_transposed
from octavo.ops.requantization import recast_norm, recast_transposed
from octavo.ops.transposition import transpose

__all__ = [
    "Backend",
    "activation_backward",
    "activation_quantize",
    "append_kv",
    "cached_attention",
    "find_backend",
    "norm_backward",
    "norm_quantize",
    "quantize",
    "quantize_both",
    "quantize_scaled",
    "quantize_stack",
    "quantize_transposed",
    "recast_norm",
    "recast_transposed",
    "scaled_mm",
    "transpose",
]
