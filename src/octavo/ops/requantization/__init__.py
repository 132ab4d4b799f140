"""Requantization: data for given scales, as an earlier quantization computed it or by larger scales."""

from octavo.ops.requantization.op import requantize, requantize_norm, requantize_transposed

__all__ = ["requantize", "requantize_norm", "requantize_transposed"]
