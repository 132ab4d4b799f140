"""The grouped GEMM of a mixture of experts: each group of rows has a matrix of its own."""

from octavo.ops.grouped_gemm.backend import find_grouped_backend
from octavo.ops.grouped_gemm.op import ALIGNMENT, grouped_mm, grouped_mm_dw

__all__ = ["ALIGNMENT", "find_grouped_backend", "grouped_mm", "grouped_mm_dw"]
