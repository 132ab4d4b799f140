"""Whole steps of a Llama of Llama-3.2-3B's blocks whose masters and AdamW are on the host, in BF16 and in FP8.

Each mode is a run of `octavo train` in a process of its own, one after the other, so the host has the state of one: 16
bytes a parameter, 45 GB, of which the masters and the gradients, 23 GB, are pinned. A step has 16,384 tokens. It is
timed with clipping, without, where a weight is updated during the backward pass, and with four micro-batches, until the
last weight is updated. `update_seconds` is what the host still needs when the GPU has computed a step: with clipping
all of AdamW. The losses of the first steps of all modes must agree.

    python -m bench.gpu.offload              two minutes on a GPU, with 16 cores and 64 GB
    python -m bench.gpu.offload --sharded    a minute more, beside FSDP2's offload of one process
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

from bench.gpu.harness import DEVICE, Options, Results, benchmark, in_new_process, peak_of, show, sized
from bench.gpu.plan import MODELS
from octavo.nn.parallel_weights import local_part
from octavo.train.processes import collect_between_steps, peak_memory, training_console
from octavo.train.trainer import Trainer, start_run

TINY = {"layers": 2, "width": 64, "heads": 2, "kv_heads": 1, "mlp_width": 128, "context": 32, "compile.blocks": False}
BASE = MODELS["3b"].change(batch=4, device=DEVICE, **{"watch.interval": 0}, **sized({}, TINY))
MODES: dict[str, dict[str, Any]] = {
    "BF16, masters on the host": {"optimizer.masters": "host", "recipe": "bf16"},
    "rowwise, masters on the host": {"optimizer.masters": "host", "recipe": "rowwise"},
}
SHARDED: dict[str, dict[str, Any]] = {"BF16, FSDP2's offload": {"optimizer.offload": True, "recipe": "bf16"}}
KINDS: dict[str, tuple[dict[str, Any], int]] = {  # settings, and steps that are timed
    "clipped": ({}, sized(3, 1)),
    "unclipped": ({"clip": 0.0}, sized(2, 1)),
    "accumulated": ({"accumulate": 4}, 1),
}
WARM = 2  # steps: the first compiles, and touches all memory
POOL = 0.02 * torch.randn(sized(1 << 24, 1 << 12), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def fill(t: Any, *args: Any, **kwargs: Any) -> None:
    """Numbers of a pool in place of drawn ones, which take one core 20 seconds for each billion."""
    for part in () if t.is_meta else torch.split(local_part(t).view(-1), POOL.numel()):
        part.copy_(POOL[: part.numel()])


def measure(mode: str) -> dict[str, Any]:
    """The row of a mode."""
    torch._dynamo.config.recompile_limit = 64
    drawn = [mock.patch(f"torch.nn.init.{name}", fill) for name in ("normal_", "kaiming_uniform_")]
    with tempfile.TemporaryDirectory() as out, collect_between_steps():
        with drawn[0], drawn[1]:
            trainer = start_run(BASE.change(out=f"{out}/run", **(MODES | SHARDED)[mode]), training_console())
        with trainer.lock:
            losses = [float(trainer.step()[0]) for _ in range(WARM)]
            kinds = {kind: time_steps(trainer, *chosen) for kind, chosen in KINDS.items()}
            parameters = sum(p.numel() for p in trainer.model.parameters())
    host = peak_memory(torch.device("cpu"))
    return {"mode": mode, "parameters": parameters, "losses": losses, "host_bytes": host, **kinds}


def time_steps(trainer: Trainer, settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """The median seconds of steps, and the most memory that the GPU takes in one."""
    config = trainer.config.change(accumulate=1, clip=1.0).change(**settings)
    trainer.config = config
    if trainer.state.hosted is not None:
        trainer.state.hosted.config = config
    times: list[tuple[float, float]] = []
    peak = [peak_of(partial(time_step, trainer, times.append), 0, warmup=0) for _ in range(steps)]
    seconds, waited = (statistics.median(each) for each in zip(*times, strict=True))
    rate = config.accumulate * BASE.batch * BASE.context / seconds
    return {"seconds": seconds, "update_seconds": waited, "tokens_per_second": rate, "peak_bytes": max(peak)}


def time_step(trainer: Trainer, note: Callable[[tuple[float, float]], None]) -> None:
    began = time.perf_counter()
    trainer.step()
    computed = time.perf_counter()
    if trainer.state.hosted is not None:
        trainer.state.hosted.wait()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    ended = time.perf_counter()
    note((ended - began, ended - computed))


@benchmark(sharded=False)
def main(options: Options) -> Results:
    """Measure, and give what there is after each mode."""
    rows: list[dict[str, Any]] = []
    for mode in MODES | (SHARDED if options.sharded else {}):
        rows.append(row := in_new_process(partial(measure, mode)))
        show(row)
        assert all(abs(a / b - 1) < 0.02 for a, b in zip(row["losses"], rows[0]["losses"], strict=True)), rows
        yield "gpu_offload", {"tokens": BASE.batch * BASE.context, "cores": torch.get_num_threads(), "rows": rows}
