"""Benchmarks of several processes, one a GPU: modes in turn with a base, agreement, collectives of FSDP2, and kernels.

Without a GPU the processes use gloo. A result is written after each mode, so a run may be ended at any time.
"""

import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.profiler import ProfilerActivity, profile

from bench.gpu.harness import DEVICE, QUICK, Row, allocated, installed, interleaved, once, peak_of, sized, summary
from bench.gpu.modes import speedup
from octavo.models.llama import LlamaConfig

GATHERED = sized(256 << 20, 1 << 16)  # bytes of the all-gather that measures a link
TIMEOUT = timedelta(seconds=120)  # of a collective: a rank that failed alone must not use up the time
ROOM = 0.85  # of the GPU's memory, that two models at once may fill


def chosen(modes: Iterable[str], base: str, only: str) -> list[str]:
    """The modes that contain one of the words `only`, and the base; without those whose package is not installed."""
    there = [name for name in modes if not name.startswith("torchao") or installed("torchao")]
    return [name for name in there if name == base or any(word in name for word in only.split(","))]


def start() -> torch.device:
    """Join the group that torchrun describes; the device of this process."""
    if DEVICE == "cpu":
        distributed.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", timeout=TIMEOUT)
    return device


def setting_of(config: LlamaConfig) -> dict[str, int]:
    """The sizes that the page of several GPUs names."""
    names = ("layers", "width", "heads", "kv_heads", "mlp_width", "vocabulary")
    sizes = {name: getattr(config, name) for name in names}
    return {**sizes, "tokens": config.context, "world": distributed.get_world_size()}


def slowest(times: list[float]) -> list[float]:
    """The largest of each time over the ranks: a step ends when its last rank ends."""
    found = torch.tensor(times, dtype=torch.float64, device=DEVICE)
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return [float(each) for each in found.tolist()]


# --- Modes in turn with a base ---------------------------------------------------------------------------------


@dataclass
class Bench:
    """Modes that are measured one by one, each in turns with the base; a ratio is the median over these turns. Where
    the memory does not hold both, the base runs first and last, and a ratio is to the mean of these two."""

    base: str
    check: Callable[[str], Row]  # facts of how right a mode is; it raises where a mode is wrong
    make: Callable[[str], Any]  # the runner of a mode
    others: Callable[[Any], Row]  # more figures of a runner
    tokens: int  # of a step
    rounds: int
    repeat: int = 3  # steps between two readings of the clock
    rows: list[Row] = field(default_factory=list)
    kept: Any = None  # the runner of the base

    def run(self, names: list[str]) -> Iterator[list[Row]]:
        """Measure the modes; all rows after each."""
        for name in names:
            yield self.attempt(name)
        if self.kept is None and len(names) > 1:
            yield self.attempt(self.base)

    def attempt(self, name: str) -> list[Row]:
        """All rows with that of a mode. One that does not run must not end the others: its row has its error, on every
        rank alike."""
        try:
            self.rows.append({"mode": name, **self.measure(name)})
        except Exception as error:
            if QUICK:
                raise
            self.rows.append({"mode": name, "error": f"{type(error).__name__}: {str(error)[:500]}"})
        return self.with_ratios()

    def measure(self, name: str) -> Row:
        """The row of a mode."""
        row, before = self.check(name), allocated()
        runner = self.make(name)
        row["peak_bytes"] = peak_of(runner.step, before, warmup=2)
        beside = {} if self.kept is None else {self.base: self.kept.step}
        found = interleaved({**beside, name: runner.step}, rounds=self.rounds, repeat=self.repeat, warmup=1)
        times = {mode: slowest(each) for mode, each in found.items()}
        row |= {**summary(times[name]), "rounds": times}
        row["tokens_per_second"] = self.tokens * 1e3 / row["median"]
        row |= {"kernels": profiled(runner.step), **self.others(runner)}
        if name != self.base and beside:
            row["ratio"] = speedup(row, name, self.base)
        if name == self.base and self.kept is None and room_for_two(row["peak_bytes"]):
            self.kept = runner
        return row

    def with_ratios(self) -> list[Row]:
        """The rows; the ratio of a mode that had no base beside it is to the mean of its first and its last time."""
        base = [row["median"] for row in self.rows if row["mode"] == self.base and "median" in row]
        return [
            {"ratio": statistics.mean(base) / row["median"], **row} if base and "median" in row else row
            for row in self.rows
        ]


def room_for_two(peak: int) -> bool:
    """Whether the memory of rank 0 holds two models with this peak: all ranks decide as it does."""
    if DEVICE == "cpu":
        return True
    fits = [2 * peak < ROOM * torch.cuda.get_device_properties().total_memory]
    distributed.broadcast_object_list(fits)
    return fits[0]


# --- The collectives of FSDP2 ----------------------------------------------------------------------------------


class Network:
    """The bytes that FSDP2 sends, and the group that sends them: the group of FSDP's mesh if `group` is None."""

    def __init__(self) -> None:
        self.group: distributed.ProcessGroup | None = None
        self.gathered = self.reduced = 0  # bytes of this rank's shards, in all calls so far

    def carry(self, model: nn.Module) -> None:
        """Let every FSDP2 unit of `model` communicate here. Call it after `send_bf16_gradients`."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(_AllGather(self))
                group = module._get_fsdp_state()._fsdp_param_group
                inner = DefaultReduceScatter() if group is None else group._reduce_scatter_comm
                module.set_custom_reduce_scatter(_ReduceScatter(self, inner))


class _AllGather(DefaultAllGather):
    def __init__(self, network: Network) -> None:
        self.network = network

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: distributed.ProcessGroup, async_op: bool = False
    ) -> distributed.Work | None:
        self.network.gathered += input_tensor.nbytes
        return super().__call__(output_tensor, input_tensor, self.network.group or group, async_op)


class _ReduceScatter(ReduceScatter):
    def __init__(self, network: Network, inner: ReduceScatter) -> None:
        self.network, self.inner = network, inner

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: distributed.ProcessGroup, op: Any,
        async_op: bool = False,
    ) -> distributed.Work | None:  # fmt: skip
        sent: Tensor = getattr(input_tensor, "memory", input_tensor)  # of send_bf16_gradients
        self.network.reduced += sent.nbytes // group.size()
        return self.inner(output_tensor, input_tensor, self.network.group or group, op, async_op)


def bandwidth(group: distributed.ProcessGroup | None = None) -> float:
    """Bytes a second that a rank receives in an all-gather of 256 MB in total."""
    world = distributed.get_world_size()
    share = torch.zeros(GATHERED // world, dtype=torch.uint8, device=DEVICE)
    whole = torch.empty(share.numel() * world, dtype=torch.uint8, device=DEVICE)
    gather, members = DefaultAllGather(), group or distributed.group.WORLD
    assert members is not None
    times = [once(lambda: gather(whole, share, members), 4) for _ in range(4)]
    return (whole.numel() - share.numel()) / (min(slowest(times[1:])) / 1e3)


# --- The kernels of a step by kind, and the communication that no computation hides ---------------------------

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
    """Milliseconds a step by kind of kernel, exposed and idle, on this GPU; {} without one."""
    sums = split(kernels_of(step, steps)) if torch.cuda.is_available() else {}
    return {kind: microseconds / 1e3 / steps for kind, microseconds in sums.items()}


def kernels_of(step: Callable[[], Any], steps: int) -> list[Kernel]:
    """The kernels of so many steps on this GPU, with their times in microseconds; none without one.

    One step more runs before and is not counted: the ranks start their profilers at different times, and wait in it.
    """
    if not torch.cuda.is_available():
        return []
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
    return without_first(kernels, 1 + steps)


def without_first(kernels: Sequence[Kernel], steps: int) -> list[Kernel]:
    """The kernels without those of the first of `steps` steps, each of which launches as many."""
    return sorted(kernels, key=lambda kernel: kernel[1])[len(kernels) // steps :]


def split(kernels: Sequence[Kernel]) -> dict[str, float]:
    """The time of each kind of kernel; of communication while nothing computes; and with no kernel at all.

    Kernels of several streams overlap, so the times of the kinds may add up to more than the step.
    """
    sums = dict.fromkeys((*KINDS, "gemm", "attention", "rest"), 0.0)
    computation: list[Kernel] = []
    for kernel in kernels:
        name, begin, end = kernel
        kind = kind_of(name.lower())
        sums[kind] += end - begin
        computation += [] if kind in KINDS else [kernel]
    busy, begins, ends = covered(kernels), [each[1] for each in kernels], [each[2] for each in kernels]
    idle = max(ends) - min(begins) - busy if kernels else 0.0
    return {**sums, "exposed": busy - covered(computation), "idle": idle}


def kind_of(name: str) -> str:
    for kind, parts in KINDS.items():
        if all(part in name for part in parts):
            return kind
    if any(part in name for part in ATTENTION):
        return "attention"
    return "gemm" if any(part in name for part in GEMM) else "rest"


def covered(kernels: Sequence[Kernel]) -> float:
    """The time in which one of the kernels or more runs."""
    total, last = 0.0, -math.inf
    for _, begin, end in sorted(kernels, key=lambda kernel: kernel[1]):
        total += max(end - max(begin, last), 0.0)
        last = max(last, end)
    return total
