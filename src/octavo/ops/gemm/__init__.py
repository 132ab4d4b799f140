"""The scaled GEMM: eight-bit operands, float32 sums."""

from octavo.ops.gemm.backend import MAX_M_OF_GROUPS, MAX_SMALL_M, Backend, backend_on, find_backend
from octavo.ops.gemm.op import scaled_mm

__all__ = ["MAX_M_OF_GROUPS", "MAX_SMALL_M", "Backend", "backend_on", "find_backend", "scaled_mm"]
