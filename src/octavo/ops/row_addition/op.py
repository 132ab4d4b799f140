"""The sum or the mean of a few long rows, in FP32."""

import torch
from torch import Tensor

from octavo.ops.row_addition.reference import add_rows_reference
from octavo.ops.triton_support import has_kernels


def add_rows(rows: Tensor, total: Tensor, *, mean: bool) -> None:
    """Write the sums over the rows of a matrix, or their means, into `total`.

    This is a function for eager code, not an operation of PyTorch: it writes into memory of the caller. On a GPU the
    rows are added in their order.

    Args:
        rows: BF16 [R, N], contiguous.
        total: float32 [N], contiguous.
    """
    if rows.numel() == 0 or not has_kernels(rows.device):
        add_rows_reference(rows, total, mean)
        return
    from octavo.ops.row_addition import kernel

    with torch.cuda.device(rows.device):
        kernel.add_rows(rows, total, mean)
