"""Measurements that several processes prepare at the same time and make one at a time.

To compile a model takes longer than to measure it. So a batch of jobs is prepared by as many processes, one job each;
then each process measures its job while all others wait, which leaves the GPU and the host to it.

While they prepare, processes share the GPU. One at a time times the candidates of a Triton kernel that Inductor
generated, since the fastest candidate is what will be measured.
"""

import contextlib
import functools
import gc
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Lock
from typing import Any

import torch

Prepare = Callable[[Any], Callable[[], Any]]


class Workers:
    """`count` processes, each with PyTorch loaded.

    Args:
        prepare: a function of a module, which takes a job and returns the function that measures it.
        count: the most jobs of a batch.
    """

    def __init__(self, prepare: Prepare, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.lock = context.Lock()
        self.ends: list[Connection] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            context.Process(target=serve, args=(theirs, prepare, self.lock), daemon=True).start()
            theirs.close()  # so that the end of the process ends the connection
            self.ends.append(ours)

    def measure(self, jobs: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Each job with what its measurement returned, or with the exception that it raised, as text."""
        ends = self.ends[: len(jobs)]
        for end, job in zip(ends, jobs, strict=True):
            end.send(job)
        for end in ends:
            end.recv()
        for end, job in zip(ends, jobs, strict=True):
            end.send(None)
            yield job, end.recv()


def serve(end: Connection, prepare: Prepare, lock: Lock) -> None:
    """Prepare and measure the jobs that come through `end`, for as long as the parent lives."""
    time_candidates_alone(lock)
    with contextlib.suppress(EOFError):  # the parent has ended
        while True:
            job = end.recv()
            measure, failure = attempt(prepare, job)
            torch.cuda.empty_cache()  # the others need the memory that compiling took
            end.send(None)
            end.recv()
            result, failure = attempt(measure) if failure is None else (None, failure)
            del measure
            gc.collect()
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            end.send(result if failure is None else failure)


def attempt(call: Any, *args: Any) -> tuple[Any, str | None]:
    """The result of the call, or the text of its exception."""
    try:
        return call(*args), None
    except Exception as error:  # the other jobs are measured all the same
        return None, f"{type(error).__name__}: {error}"


def time_candidates_alone(lock: Lock) -> None:
    """Let Inductor time the candidates of a kernel only while it has `lock`."""
    from torch._inductor.runtime.benchmarking import benchmarker

    found = benchmarker.benchmark_gpu

    @functools.wraps(found)
    def alone(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return found(*args, **kwargs)

    benchmarker.benchmark_gpu = alone
