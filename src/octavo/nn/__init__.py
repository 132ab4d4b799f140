"""Modules: the linear layer on eight-bit GEMMs, and the conversion of a model to it."""

from octavo.nn.convert import DEFAULT_SKIP, Conversion, convert
from octavo.nn.delayed import load_scale_state, scale_state, update_scales
from octavo.nn.linear import Linear

__all__ = ["DEFAULT_SKIP", "Conversion", "Linear", "convert", "load_scale_state", "scale_state", "update_scales"]
