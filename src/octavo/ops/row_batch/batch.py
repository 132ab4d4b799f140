"""Matrices that are quantized together."""

from collections.abc import Sequence

import torch
from torch import Tensor


class RowBatch:
    """Matrices of one dtype, device and number of columns. Row r of matrix i is row `starts[i]` + r of the batch.

    Args:
        matrices: [M_i, K], contiguous, one at least; M_i may be 0.
        starts: of the matrices, in the rows of the batch.

    Attributes:
        addresses: of the matrices; aligned: whether all are multiples of 16 bytes.
        longest: the largest M_i.
        table: on a GPU, [matrices, 3] int64: address, M_i and start of each matrix.
    """

    def __init__(self, matrices: Sequence[Tensor], starts: Sequence[int]) -> None:
        self.matrices, self.starts = list(matrices), list(starts)
        self.addresses = [m.data_ptr() for m in matrices]
        self.aligned = all(address % 16 == 0 for address in self.addresses)
        self.longest = max(m.shape[0] for m in matrices)
        self.table: Tensor | None = None
        if matrices[0].is_cuda:
            rows = [[m.data_ptr(), m.shape[0], start] for m, start in zip(matrices, starts, strict=True)]
            self.table = torch.tensor(rows, dtype=torch.int64, device=matrices[0].device)
