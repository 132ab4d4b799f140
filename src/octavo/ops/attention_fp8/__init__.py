"""Causal attention of many queries in E4M3, forward and backward."""

from octavo.ops.attention_fp8.op import Attended, fp8_attention, fp8_attention_backward
from octavo.ops.attention_fp8.support import GRADIENT_TILE, fp8_attention_limit

__all__ = [
    "GRADIENT_TILE",
    "Attended",
    "fp8_attention",
    "fp8_attention_backward",
    "fp8_attention_limit",
]
