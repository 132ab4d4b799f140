"""Dtype flow: which operations of a model run in FP32, BF16, FP16 and FP8 in a forward and backward pass, and why."""

from octavo.flow.report import DtypeFlow
from octavo.flow.trace import dtype_flow

__all__ = ["DtypeFlow", "dtype_flow"]
