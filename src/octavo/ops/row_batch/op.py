"""Quantization of many matrices by row, in two steps and two launches: amax of each row, then the bytes.

Between the steps the caller computes the scales, which may depend on rows that other ranks hold. Where most scales are
those of the row's own amax, the first step writes the bytes too, and the second writes only those of other rows.

These are functions for eager code, not operations of PyTorch: they write into memory of the caller.
"""

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.ops.row_batch.batch import RowBatch
from octavo.ops.row_batch.reference import cast_rows_reference, row_amaxes_reference
from octavo.ops.triton_support import FORMATS, LONGEST_ROW, has_kernels


def row_amaxes(batch: RowBatch, amax: Tensor, data: Tensor | None, cast: Cast) -> None:
    """Write the amax of each row, infinite where a number is not finite, into `amax`.

    Args:
        amax: float32 [rows of the batch].
        data: of the cast's dtype, [rows of the batch, K]. If given, the bytes by the scale of each row's own amax are
            written into it. The relative floor of the cast is ignored.
    """
    if not _has_kernel(batch, cast):
        row_amaxes_reference(batch.matrices, batch.starts, amax, data, cast)
        return
    from octavo.ops.row_batch import kernel

    with torch.cuda.device(amax.device):
        kernel.row_amaxes(batch, amax, data, cast)


def cast_rows(batch: RowBatch, scale: Tensor, written: Tensor | None, data: Tensor, cast: Cast) -> None:
    """Write the bytes of each row by its scale; numbers beyond the format's max saturate.

    Args:
        scale: float32 [rows of the batch], contiguous.
        written: the scales by which `data` was written before, contiguous; a row whose scale is the same is skipped.
        data: of the cast's dtype, [rows of the batch, K], contiguous.

    Raises:
        ValueError: a tensor is not contiguous. The kernel would read or write other memory.
    """
    for name, t in (("scale", scale), ("written", written), ("data", data)):
        if t is not None and not t.is_contiguous():
            raise ValueError(f"cast_rows needs a contiguous {name}, not strides {t.stride()}: call .contiguous()")
    if not _has_kernel(batch, cast):
        cast_rows_reference(batch.matrices, batch.starts, scale, data, cast)
        return
    from octavo.ops.row_batch import kernel

    with torch.cuda.device(data.device):
        kernel.cast_rows(batch, scale, written, data, cast)


def _has_kernel(batch: RowBatch, cast: Cast) -> bool:
    first = batch.matrices[0]
    fits = batch.longest > 0 and 0 < first.shape[1] <= LONGEST_ROW
    return fits and cast.format in FORMATS and has_kernels(first.device)
