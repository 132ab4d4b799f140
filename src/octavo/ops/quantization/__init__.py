"""From a matrix to eight-bit data and scales."""

from octavo.ops.quantization.op import (
    quantize,
    quantize_both,
    quantize_scaled,
    quantize_stack,
    quantize_transposed,
)

__all__ = ["quantize", "quantize_both", "quantize_scaled", "quantize_stack", "quantize_transposed"]
