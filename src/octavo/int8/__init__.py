"""The INT8 GEMM: both operands in int8 with a scale for each row, sums in int32."""

from octavo.int8.backend import find_int8_backend
from octavo.int8.op import int8_mm

__all__ = ["find_int8_backend", "int8_mm"]
