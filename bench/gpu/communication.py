"""The kernels of a step on several GPUs by kind, and the communication that no computation hides."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]
Kernel = tuple[str, float, float]  # its name, its begin and its end

KINDS = {  # parts of the kernels' names, in lower case; the first kind that matches counts
    "all-gather": ("nccl", "allgather"),
    "reduce-scatter": ("nccl", "reducescatter"),
    "all-to-all": ("nccl", "sendrecv"),
    "other communication": ("nccl",),
}
ATTENTION, GEMM = ("sdpa", "fmha", "flash", "cudnn"), ("nvjet", "gemm", "cutlass")
ANNOTATIONS = ("nccl:", "FSDP::", "Optimizer.", "ProfilerStep", "##")  # ranges on the timeline that are no kernels


def profiled(step: Callable[[], Any], steps: int = 2) -> dict[str, float]:
    """Milliseconds a step by kind of kernel, exposed and idle, on this GPU; {} without one.

    One step more runs before and is not counted: the ranks start their profilers at different times, and wait in it.
    """
    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(1 + steps):
            step()
        torch.cuda.synchronize()
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type.name == "CUDA" and not (event.is_user_annotation or event.name.startswith(ANNOTATIONS))
    ]
    counted = without_first(kernels, 1 + steps)
    return {kind: microseconds / 1e3 / steps for kind, microseconds in split(counted).items()}


def without_first(kernels: Sequence[Kernel], steps: int) -> list[Kernel]:
    """The kernels without those of the first of `steps` steps, each of which launches as many."""
    return sorted(kernels, key=lambda kernel: kernel[1])[len(kernels) // steps :]


def split(kernels: Sequence[Kernel]) -> dict[str, float]:
    """The time of each kind of kernel; of communication while nothing computes; and with no kernel at all.

    Kernels of several streams overlap, so the times of the kinds may add up to more than the step.
    """
    sums = dict.fromkeys((*KINDS, "gemm", "attention", "rest"), 0.0)
    communication: list[Interval] = []
    computation: list[Interval] = []
    for name, begin, end in kernels:
        kind = kind_of(name.lower())
        sums[kind] += end - begin
        (communication if kind in KINDS else computation).append((begin, end))
    busy, computing = union([*communication, *computation]), union(computation)
    whole = busy[-1][1] - busy[0][0] if busy else 0.0
    return {**sums, "exposed": length(busy) - length(computing), "idle": whole - length(busy)}


def kind_of(name: str) -> str:
    for kind, parts in KINDS.items():
        if all(part in name for part in parts):
            return kind
    if any(part in name for part in ATTENTION):
        return "attention"
    return "gemm" if any(part in name for part in GEMM) else "rest"


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same times as intervals in order that do not overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Sequence[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
