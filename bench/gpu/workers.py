"""Measurements that several processes prepare at the same time and make one at a time.

To compile a model takes longer than to measure it. So a batch of jobs is prepared by as many processes, one job each,
on all GPUs in turn; then each process measures its job while all others of its GPU wait.

While they prepare, processes share a GPU. One at a time times the candidates of a Triton kernel that Inductor
generated, since the fastest candidate is what will be measured.
"""

import contextlib
import functools
import gc
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.synchronize import Lock
from typing import Any

import torch

Prepare = Callable[[Any], Callable[[], Any]]


class Workers:
    """`count` processes, each with PyTorch loaded; process i uses GPU i modulo the number of GPUs.

    Args:
        prepare: a function of a module, which takes a job and returns the function that measures it.
        count: the most jobs of a batch.
    """

    def __init__(self, prepare: Prepare, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.gpus = max(1, torch.cuda.device_count())
        self.locks = [context.Lock() for _ in range(self.gpus)]
        self.ends: list[Connection] = []
        for i in range(count):
            ours, theirs = context.Pipe()
            gpu = i % self.gpus
            context.Process(target=serve, args=(theirs, prepare, gpu, self.locks[gpu]), daemon=True).start()
            theirs.close()  # so that the end of the process ends the connection
            self.ends.append(ours)

    def measure(self, jobs: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Each job with what its measurement returned, or with the exception that it raised, as text."""
        job_of = dict(zip(self.ends[: len(jobs)], jobs, strict=True))
        for end, job in job_of.items():
            end.send(job)
        for end in job_of:
            end.recv()
        lanes = [iter(list(job_of)[gpu :: self.gpus]) for gpu in range(self.gpus)]
        lane_of = {first: lane for lane in lanes if (first := start_next(lane)) is not None}
        while lane_of:
            ready = wait(list(lane_of))
            for end in [each for each in lane_of if each in ready]:
                yield job_of[end], end.recv()
                lane = lane_of.pop(end)
                following = start_next(lane)
                if following is not None:
                    lane_of[following] = lane


def start_next(lane: Iterator[Connection]) -> Connection | None:
    """Let the next process of a GPU measure."""
    end = next(lane, None)
    if end is not None:
        end.send(None)
    return end


def serve(end: Connection, prepare: Prepare, gpu: int, lock: Lock) -> None:
    """Prepare and measure the jobs that come through `end`, for as long as the parent lives."""
    if torch.cuda.is_available():
        torch.cuda.set_device(gpu)
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
