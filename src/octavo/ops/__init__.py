"""The operations. Each is declared in one file, with its checks and its reference; `kernels` has the Triton kernels.

A CPU runs the reference, a GPU the kernels. Both give the same bytes, except for `attention_fp8`, which cuDNN runs. A
tensor of another shape or dtype than a docstring names, and a cast that an operation does not do, raise a ValueError.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.ops.activation import activation_backward, activation_quantize, activation_scales
    from octavo.ops.attention import append_kv, cached_attention
    from octavo.ops.attention_fp8 import Attended, fp8_attention, fp8_attention_backward
    from octavo.ops.dispatch import (
        Backend,
        find_backend,
        find_grouped_backend,
        find_weight_only_backend,
        fp8_attention_limit,
    )
    from octavo.ops.gemm import add_product, scaled_mm
    from octavo.ops.grouped_gemm import grouped_mm, grouped_mm_dw
    from octavo.ops.largest import index_of_largest
    from octavo.ops.norm import norm_backward, norm_quantize, norm_quantize_inference
    from octavo.ops.permutation import Rows, aligned_groups, combine, gather_quantize, sort_by_expert
    from octavo.ops.quantization import (
        quantize,
        quantize_matrices,
        quantize_matrices_transposed,
        quantize_scaled,
        quantize_stack,
        quantize_transposed,
        requantize,
        requantize_norm,
        requantize_transposed,
        row_scales,
    )
    from octavo.ops.rotary import rotate_append, turn_heads
    from octavo.ops.rotation import rotate
    from octavo.ops.transposition import FoldedScales, fold_scales, group_of_rows, transpose
    from octavo.ops.weight_only import grouped_weight_only_mm, weight_only_mm

__all__ = [
    "Attended", "Backend", "FoldedScales", "Rows", "activation_backward", "activation_quantize",
    "activation_scales", "add_product", "aligned_groups", "append_kv", "cached_attention",
    "combine", "find_backend", "find_grouped_backend", "find_weight_only_backend", "fold_scales", "fp8_attention",
    "fp8_attention_backward", "fp8_attention_limit", "gather_quantize", "group_of_rows",
    "grouped_mm", "grouped_mm_dw", "grouped_weight_only_mm", "index_of_largest", "norm_backward",
    "norm_quantize", "norm_quantize_inference", "quantize", "quantize_matrices", "quantize_matrices_transposed",
    "quantize_scaled", "quantize_stack", "quantize_transposed", "requantize", "requantize_norm",
    "requantize_transposed", "rotate", "rotate_append", "row_scales", "scaled_mm", "sort_by_expert",
    "transpose", "turn_heads", "weight_only_mm",
]  # fmt: skip
_FILES = (
    "activation", "attention", "attention_fp8", "dispatch", "gemm", "grouped_gemm", "largest", "norm", "permutation",
    "quantization", "rotary", "rotation", "transposition", "weight_only",
)  # fmt: skip


if not TYPE_CHECKING:  # a type checker would take every name for one of the package

    def __getattr__(name: str) -> Any:
        """An operation. The first import of one imports all, so that a file such as dispatch.py is imported alone."""
        if name not in __all__:
            raise AttributeError(f"module 'octavo.ops' has no attribute {name!r}")
        for file in _FILES:
            found = vars(import_module(f"octavo.ops.{file}"))
            globals().update({each: found[each] for each in __all__ if each in found})
        return globals()[name]
