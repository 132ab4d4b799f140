"""The processes of a run, its ranks, and how they agree. A run without a process group has the one rank 0."""

import functools
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: Any) -> list[Any]:
    """The `value` of every rank, in their order, on every rank; it must be picklable."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=_message_group(dist.group.WORLD))
    return values


@contextmanager
def same_outcome() -> Iterator[None]:
    """If the block fails on any rank, it fails on all of them, with the error of the lowest rank that failed.

    So no rank waits in a collective for one that has left. Every rank must enter the block.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    errors = gather(_picklable(error) if world_size() > 1 else error)
    failed = [number for number, each in enumerate(errors) if each is not None]
    if failed:  # a rank raises its own error where it can: that has the traceback
        raise error if error is not None and failed[0] == rank() else errors[failed[0]]


class Agreement:
    """Takes the maximum over all ranks of a few integers, step after step, without waiting for the slowest rank.

    The all-reduce runs on the CPU while the next step computes, so its result comes one call later, in the same call on
    all ranks. A single process has its result at once.
    """

    def __init__(self) -> None:
        self._values, self._work = torch.zeros(0), None

    def reach(self, *values: int) -> Sequence[int]:
        """The largest `values` over all ranks, in the call before this one; 0 in the first call."""
        if world_size() == 1:
            return values
        if self._work is not None:
            self._work.wait()
        agreed = [int(value) for value in self._values] or [0] * len(values)
        self._values = torch.tensor(values, dtype=torch.int64)
        self._work = dist.all_reduce(self._values, dist.ReduceOp.MAX, _message_group(dist.group.WORLD), async_op=True)
        return agreed


def _picklable(error: Exception | None) -> Exception | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@functools.lru_cache(maxsize=1)
def _message_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group for messages between CPUs: that of the GPUs would wait for the kernels before it.

    All ranks wait in it while rank 0 reads and tokenizes the data, which may take hours. A rank that ends is noticed at
    once, and one that stands still in a step by the collectives of the weights, after `parallel.timeout`.
    """
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    return group
