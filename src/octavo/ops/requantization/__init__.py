"""Requantization: the transposed data of an earlier quantization, computed again from its input and its scales."""

from octavo.ops.requantization.op import requantize_norm, requantize_transposed

__all__ = ["requantize_norm", "requantize_transposed"]
