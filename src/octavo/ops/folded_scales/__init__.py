"""The scales of the backward GEMMs of one-time quantization, from those of x, g and w."""

from octavo.ops.folded_scales.op import FoldedScales, fold_scales

__all__ = ["FoldedScales", "fold_scales"]
