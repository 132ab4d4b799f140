"""Modules: the linear layer on eight-bit GEMMs, norms and MLPs fused with it, and the conversion of a model to them."""

from octavo.nn.attention_layers import use_bf16_attention, use_fp8_attention
from octavo.nn.conversion import convert, high_precision, restore
from octavo.nn.conversion_report import Conversion
from octavo.nn.experts import Experts, GroupedLinear
from octavo.nn.fused_modules import GEGLU, GELU, FusedMLP, NormLinear, SwiGLU
from octavo.nn.linear import Linear
from octavo.nn.selection import DEFAULT_SKIP, select_linears

__all__ = [
    "DEFAULT_SKIP",
    "GEGLU",
    "GELU",
    "Conversion",
    "Experts",
    "FusedMLP",
    "GroupedLinear",
    "Linear",
    "NormLinear",
    "SwiGLU",
    "convert",
    "high_precision",
    "restore",
    "select_linears",
    "use_bf16_attention",
    "use_fp8_attention",
]
