"""Benchmarks of several processes, one a GPU: their start, their agreement, and the collectives of FSDP2.

Without a GPU the processes use gloo, for rehearsals.
"""

import argparse
import math
import os
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from bench import record
from bench.gpu.harness import once

GATHERED = 256 << 20  # bytes of the all-gather that measures a link
TIMEOUT = timedelta(seconds=120)  # of a collective: a rank that failed alone must not use up the time


def read_options(what: str | None, layers: int, rounds: int) -> argparse.Namespace:
    """The options of a benchmark of modes, with these defaults; `what` is its description."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--only", metavar="WORDS", help="the modes that contain one of these words, and BF16")
    parser.add_argument("--rounds", type=int, default=rounds, help="times that each mode has its turn")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no mode that would end later")
    return parser.parse_args()


def chosen(modes: Iterable[str], base: str, only: str | None) -> list[str]:
    """The modes that contain one of the words `only`, and the base; without those whose package is not installed."""
    there = [name for name in modes if not name.startswith("torchao") or record.installed("torchao")]
    words = only.split(",") if only else [""]
    return [name for name in there if name == base or any(word in name for word in words)]


def start() -> torch.device:
    """Join the group that torchrun describes; the device of this process."""
    if not torch.cuda.is_available():
        if not distributed.is_initialized():  # a test makes the group itself
            distributed.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", timeout=TIMEOUT)
    return device


def say(*words: object) -> None:
    """Print on rank 0."""
    if distributed.get_rank() == 0:
        print(*words, flush=True)


def agreed(value: Any) -> Any:
    """The value of rank 0, on every rank."""
    values = [value]
    distributed.broadcast_object_list(values)
    return values[0]


def slowest(times: list[float]) -> list[float]:
    """The largest of each time over the ranks: a step ends when its last rank ends."""
    found = torch.tensor(times, dtype=torch.float64, device=_device())
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return [float(each) for each in found.tolist()]


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class Deadline:
    """The seconds of a benchmark: no part starts that, taking as long as the longest before it, would end later."""

    def __init__(self, seconds: float) -> None:
        self.began = self.last = time.monotonic()
        self.seconds, self.longest = seconds, 0.0

    def allows(self, part: str) -> bool:
        """True if `part` may start. Rank 0 decides for all."""
        now = time.monotonic()
        self.longest, self.last = max(self.longest, now - self.last), now
        ends = now - self.began + self.longest
        allowed: bool = agreed(ends <= self.seconds)
        if not allowed:
            say(f"{part} is not started: it would end after {ends:.0f} s of {self.seconds:.0f}")
        return allowed


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
                module.set_custom_reduce_scatter(_ReduceScatter(self, _reduce_scatter_of(module)))


def _reduce_scatter_of(unit: FSDPModule) -> ReduceScatter:
    group = unit._get_fsdp_state()._fsdp_param_group
    return DefaultReduceScatter() if group is None else group._reduce_scatter_comm


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
    share = torch.zeros(GATHERED // world, dtype=torch.uint8, device=_device())
    whole = torch.empty(share.numel() * world, dtype=torch.uint8, device=_device())
    gather, members = DefaultAllGather(), group or distributed.group.WORLD
    assert members is not None
    times = [once(lambda: gather(whole, share, members), 4) for _ in range(4)]
    return (whole.numel() - share.numel()) / (min(slowest(times[1:])) / 1e3)
