"""How it is computed. One folder an operation: its door, its reference twin (which is the CPU's path), its kernels."""

from octavo.ops.gemm import Backend, find_backend, scaled_mm
from octavo.ops.quantize import quantize, quantize_both, quantize_scaled, quantize_transposed
from octavo.ops.transpose import transpose

__all__ = [
    "Backend",
    "find_backend",
    "quantize",
    "quantize_both",
    "quantize_scaled",
    "quantize_transposed",
    "scaled_mm",
    "transpose",
]
