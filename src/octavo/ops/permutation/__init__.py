"""Rows of tokens sorted by expert and back, fused with quantization."""

from octavo.ops.permutation.groups import Rows, aligned_groups, group_of_rows, group_shifts, sort_by_expert
from octavo.ops.permutation.op import combine, combine_weight_gradient, gather_quantize

__all__ = [
    "Rows",
    "aligned_groups",
    "combine",
    "combine_weight_gradient",
    "gather_quantize",
    "group_of_rows",
    "group_shifts",
    "sort_by_expert",
]
