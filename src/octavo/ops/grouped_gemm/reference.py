"""The grouped GEMM in plain PyTorch, exact but for the order of its float32 sums. It reads the offsets on the host."""

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.numerics.codec import widen
from octavo.numerics.granularity import Granularity
from octavo.ops.gemm.reference import scaled_mm_reference


def grouped_mm_reference(
    a: Tensor,
    scale_a: Tensor,
    granularity_a: Granularity,
    b: Tensor,
    scale_b: Tensor,
    granularity_b: Granularity,
    offsets: Tensor,
) -> Tensor:
    """float32 y [M, N] from a [M, K] and b [E, N, K]. Rows beyond the last group are zero."""
    y = a.new_zeros((a.shape[0], b.shape[1]), dtype=torch.float32)
    for e, rows in enumerate(rows_of_groups(offsets)):
        y[rows] = scaled_mm_reference(a[rows], scale_a[rows], granularity_a, b[e], scale_b[e], granularity_b)
    return y


def grouped_mm_dw_reference(a: Tensor, scale_a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """float32 dw [E, N, K] from a [N, M] and b [K, M]."""
    dw = a.new_zeros((len(offsets), a.shape[0], b.shape[0]), dtype=torch.float32)
    with torch.autocast(a.device.type, enabled=False):  # it would run these products in BF16
        for e, columns in enumerate(rows_of_groups(offsets)):
            dw[e] = (widen(a[:, columns]) @ widen(b[:, columns]).t()) * scale_a[e]  # [N,M_e] @ [K,M_e]^T
    return dw


def rows_of_groups(offsets: Tensor) -> Iterator[slice]:
    """The rows of each group, of which `offsets` int32 [E] has the ends. The host waits for the numbers."""
    start = 0
    for end in offsets.tolist():
        yield slice(start, end)
        start = end
