"""Quantization: from a matrix to eight-bit data and scales."""

from octavo.ops.quantization.op import quantize, quantize_scaled, quantize_stack, quantize_transposed

__all__ = ["quantize", "quantize_scaled", "quantize_stack", "quantize_transposed"]
