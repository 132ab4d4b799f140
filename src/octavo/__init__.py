"""Octavo: FP8 for PyTorch over the whole life of a model."""

from octavo.flow import dtype_flow
from octavo.loading import load
from octavo.nn import (
    Conversion,
    Linear,
    cast_once,
    convert,
    freeze_scales,
    learn_scales,
    load_scale_state,
    restore,
    saturation,
    scale_state,
    seed_scales,
    update_scales,
)
from octavo.numerics import FORMATS, Cast, Granularity, History, QTensor
from octavo.recipe import PRESETS, Gemm, Recipe
from octavo.telemetry import watch
from octavo.tensor import quantize
from octavo.version import __version__

__all__ = [
    "FORMATS",
    "PRESETS",
    "Cast",
    "Conversion",
    "Gemm",
    "Granularity",
    "History",
    "Linear",
    "QTensor",
    "Recipe",
    "__version__",
    "cast_once",
    "convert",
    "dtype_flow",
    "freeze_scales",
    "learn_scales",
    "load",
    "load_scale_state",
    "quantize",
    "restore",
    "saturation",
    "scale_state",
    "seed_scales",
    "update_scales",
    "watch",
]
