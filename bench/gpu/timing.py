"""How the GPU benchmarks measure: variants take turns in one process, several steps at a time, medians of the rounds.

Steps follow each other without a synchronization, as in training, so that a variant whose host code is ahead of the
device is not charged for it; and every variant is timed on a device that the others have warmed, in an order drawn anew
each round: what ran before, and how much power it drew, sets the clock.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import nn

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
    """A subclass with a forward of its own: torch.compile keeps what it compiles, and counts it, by code object."""
    forward = cls.forward
    copy = FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__)
    return type(cls.__name__, (cls,), {"forward": copy})


def once(step: Step, repeat: int) -> float:
    """Milliseconds a step, of `repeat` in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeat):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeat


class Captured:
    """A step as one CUDA graph, after a few calls as they are; what it returns is overwritten by the next call.

    It holds the step, whose memory the graph reads and writes and does not keep.
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
            self.found = step()

    def __call__(self) -> Any:
        self.graph.replay()
        return self.found


def replayed(step: Step, *, calls: int = 6, rounds: int = 8) -> float:
    """Median milliseconds of a small piece of device work, launch costs excluded: a CUDA graph of a few calls.

    What the L2 cache keeps from call to call counts; compare with something that moves as many bytes, timed alike.
    """
    step()
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            step()
    graph.replay()
    return statistics.median(once(graph.replay, 4) for _ in range(rounds)) / calls  # in a row: the first waits for us


def summary(times: list[float]) -> dict[str, float]:
    """Median and quartiles in milliseconds."""
    low, middle, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
    return {"median": middle, "low": low, "high": high}


def sqnr(exact: torch.Tensor, found: torch.Tensor) -> float:
    """Signal to quantization noise in dB."""
    exact, found = exact.double(), found.double()
    return float(10 * torch.log10(exact.square().sum() / (found - exact).square().sum()))
