"""Modules: the linear layer on eight-bit GEMMs, norms and MLPs fused with it, and the conversion of a model to them."""

from octavo.nn.attention_precision import use_bf16_attention, use_fp8_attention
from octavo.nn.conversion import convert
from octavo.nn.conversion_report import Conversion
from octavo.nn.delayed import load_scale_state, scale_state, update_scales
from octavo.nn.experts import Experts
from octavo.nn.grouped_linear import GroupedLinear
from octavo.nn.linear import Linear
from octavo.nn.mlp import GEGLU, GELU, FusedMLP, SwiGLU
from octavo.nn.norm_linear import NormLinear
from octavo.nn.restoration import restore
from octavo.nn.scale_learning import freeze_scales, learn_scales, saturation, seed_scales
from octavo.nn.selection import DEFAULT_SKIP, select_linears
from octavo.nn.weight_cache import cast_once

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
    "cast_once",
    "convert",
    "freeze_scales",
    "learn_scales",
    "load_scale_state",
    "restore",
    "saturation",
    "scale_state",
    "seed_scales",
    "select_linears",
    "update_scales",
    "use_bf16_attention",
    "use_fp8_attention",
]
