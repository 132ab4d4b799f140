"""The order of quantizing, all-gathers and the all-reduce of a step, in the host's calls and in a GPU's streams."""

from collections.abc import Callable
from typing import Any

import torch
from fsdp_examples import backward, blocks
from ranks import run_ranks
from stream_order import has_run, ordered_streams, run
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

import octavo
from octavo.dist import fp8_all_gather
from octavo.dist.shard_quantization import ShardQuantizer

WORK = "update", "measure", "finish"  # what is done with all weights once a step; the last has the all-reduce

Events = list[tuple[str, tuple[str, ...]]]  # what is called, and the work of this step that it surely runs after


def note(events: Events, name: str) -> None:
    step = sum(name == "update" for name, _ in events)
    events.append((name, tuple(work for work in WORK if has_run(f"{work} {step}"))))
    run(f"{name} {step + (name == 'update')}")


def noted(events: Events, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        note(events, name)
        return function(*args, **kwargs)

    return call


class NotedAllGather(DefaultAllGather):
    def __init__(self, events: Events, unit: str) -> None:
        self.events, self.unit = events, unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        note(self.events, self.unit)
        return super().__call__(*args, **kwargs)


def two_steps(rank: int) -> Events:
    events: Events = []
    quantizer: Any = ShardQuantizer
    for name in ("measure", "finish"):
        setattr(quantizer, name, noted(events, name, getattr(quantizer, name)))
    torch.manual_seed(0)
    model: Any = nn.Sequential(*blocks(), nn.RMSNorm(32))
    octavo.convert(model)
    with ordered_streams():
        for block in model[:2]:
            fully_shard(block)
        fully_shard(model)
        fp8_all_gather(model)
        for name, unit in model.named_modules():
            if isinstance(unit, FSDPModule):
                unit.set_custom_all_gather(NotedAllGather(events, f"gather {name}".strip()))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step = noted(events, "update", optimizer.step)
        for step in range(2):
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    return events


def test_the_gather_of_the_root_waits_for_no_weight_to_be_quantized() -> None:
    for events in run_ranks(2, two_steps):
        begin = events.index(("update", ("measure", "finish")))  # which writes what these read
        assert events[begin + 1 :] == [
            ("measure", ("update",)),
            ("gather", ("update",)),
            ("finish", ("update", "measure")),
            *((f"gather {block}", WORK) for block in (0, 1, 1, 0)),
            ("update", WORK),
            ("measure", ("update",)),
        ]
