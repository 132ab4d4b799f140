"""The way of the statistics of a step: combined over the ranks on their devices, then copied to the host.

The copy does not wait for the device, and the training goes on. Whoever needs the numbers waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from octavo.telemetry.schema import Array

Table = tuple[Tensor, int]  # float64 [rows, maxima and sums], and the number of its columns that are maxima


class Transfer:
    """Tables of statistics on their way to the host. Every rank must make one at the same step.

    Args:
        tables: which the ranks combine.
        interval: the largest of all ranks is sent along.
    """

    def __init__(self, tables: Sequence[Table], interval: int) -> None:
        self._shapes = [(len(table), n, table.shape[1] - n) for table, n in tables]
        number = tables[0][0].new_full((1,), interval)
        maxima = torch.cat([*(table[:, :n].reshape(-1) for table, n in tables), number])
        sums = torch.cat([table[:, n:].reshape(-1) for table, n in tables])
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(maxima, dist.ReduceOp.MAX)
            dist.all_reduce(sums)
        self._copies = _host_copy(maxima), _host_copy(sums)
        self._copied: Any = None
        if maxima.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def wait(self) -> tuple[list[Array], int]:
        """Wait for the copy: the tables, and the interval."""
        if self._copied is not None:
            self._copied.synchronize()
        maxima, sums = (copy.numpy() for copy in self._copies)
        tables, i, j = [], 0, 0
        for rows, n, m in self._shapes:
            parts = maxima[i : i + rows * n].reshape(rows, n), sums[j : j + rows * m].reshape(rows, m)
            tables.append(np.concatenate(parts, 1))
            i, j = i + rows * n, j + rows * m
        return tables, int(maxima[-1])


def _host_copy(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.cpu()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
