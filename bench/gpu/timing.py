"""Timing on a GPU: variants take turns in one process, several steps at a time; a figure is the median of the rounds.

Steps follow each other without a synchronization, as in training, so that host code that runs ahead of the device costs
nothing. The order is drawn anew each round, because the work before, and the power that it drew, sets the clock.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn

from octavo.evaluation.metrics import energies, sqnr

Step = Callable[[], Any]


def interleaved(steps: Mapping[str, Step], *, rounds: int, repeat: int, warmup: int = 3) -> dict[str, list[float]]:
    """Milliseconds a step of each variant, one entry a round."""
    for step in steps.values():
        for _ in range(warmup):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    order, drawn = list(steps), random.Random(0)
    for _ in range(rounds):
        drawn.shuffle(order)
        for name in order:
            times[name].append(once(steps[name], repeat))
    return times


def own_code(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass with a copy of the code of `forward`. torch.compile counts and caches compilations by code object."""
    forward = cls.forward
    copy = FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__)
    return type(cls.__name__, (cls,), {"forward": copy})


def once(step: Step, repeat: int) -> float:
    """Milliseconds a step, of `repeat` in a row; by the clock in a rehearsal without a GPU."""
    if not torch.cuda.is_available():
        began = time.perf_counter()
        for _ in range(repeat):
            step()
        return (time.perf_counter() - began) * 1e3 / repeat
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeat):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeat


def host_once(step: Step) -> float:
    """Milliseconds that the host takes for a step, which begins with an idle GPU and is not waited for.

    The queue of a stream has some 1,000 places. Where a step launches more, and the GPU is slower than the host, this
    is longer than the host needs.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    return (time.perf_counter() - began) * 1e3


class Captured:
    """A step as one CUDA graph, after a few ordinary calls. Each call overwrites the result of the one before.

    The object holds the step, because the graph does not hold the memory that the step reads and writes.
    """

    def __init__(self, step: Step) -> None:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        self.step, self.graph = step, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = step()

    def __call__(self) -> Any:
        self.graph.replay()
        return self.result


def replayed(step: Step, *, calls: int = 6, rounds: int = 8) -> float:
    """Median milliseconds of a small piece of device work without its launch: a CUDA graph of a few calls.

    Reads may hit the L2 cache from call to call. Compare with work that moves as many bytes, timed alike.
    """

    def repeat() -> None:
        for _ in range(calls):
            step()  # its result is dropped, so that each call writes to the same memory

    graph = Captured(repeat)
    graph()
    return statistics.median(once(graph, 4) for _ in range(rounds)) / calls


def summary(times: list[float]) -> dict[str, float]:
    """Median and quartiles in milliseconds."""
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return {"median": middle, "low": low, "high": high}


def decibels(exact: torch.Tensor, actual: torch.Tensor) -> float:
    """The SQNR of `actual`."""
    return sqnr(*energies(exact, actual))


def against(base: str, steps: Mapping[str, Step], least: float = 10) -> dict[str, float]:
    """The SQNR of what each other step returns against that of `base`; all must exceed `least` decibels."""
    exact = steps[base]().clone()  # a graph overwrites its result
    found = {name: decibels(exact, step()) for name, step in steps.items() if name != base}
    assert all(db > least for db in found.values()), found  # NaN is not
    return found
