"""Quantization: from a matrix to eight-bit data and scales."""

from octavo.ops.quantization.op import (
    quantize,
    quantize_matrices,
    quantize_scaled,
    quantize_stack,
    quantize_transposed,
    row_scales,
)

__all__ = [
    "quantize",
    "quantize_matrices",
    "quantize_scaled",
    "quantize_stack",
    "quantize_transposed",
    "row_scales",
]
