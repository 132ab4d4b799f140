"""The weight-only GEMM: a weight in E4M3, an input in BF16 or FP16, float32 sums."""

from octavo.ops.weight_only.backend import MAX_FASTER_M, find_weight_only_backend
from octavo.ops.weight_only.op import grouped_weight_only_mm, weight_only_mm

__all__ = ["MAX_FASTER_M", "find_weight_only_backend", "grouped_weight_only_mm", "weight_only_mm"]
