"""Steps with masters and AdamW on the host: BF16 and FP8 beside FSDP2's offload of one process.

A Llama of Llama-3.2-3B's blocks, 16,384 tokens a step, and four micro-batches of them; clipping, and without clipping,
where each weight is updated during the backward pass. The modes take turns, a few whole steps at a time, and a figure
is the median of the rounds. BF16 and `rowwise` share their masters. Before that all modes compute one loss.

    python -m bench.gpu.offload        about two minutes on a GPU with 32 cores and 256 GB of memory
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.gpu.harness import DEVICE, Options, Results, benchmark, show, sized
from bench.gpu.plan import MODELS
from octavo.nn.linear import Linear
from octavo.nn.parallel_weights import local_part
from octavo.recipe import get_recipe
from octavo.train.processes import collect_between_steps, training_console
from octavo.train.trainer import Trainer, start_run

TINY = {"layers": 2, "width": 64, "heads": 2, "kv_heads": 1, "mlp_width": 128, "context": 32, "compile.blocks": False}
BASE = MODELS["3b"].change(batch=4, device=DEVICE, **{"watch.interval": 0}, **sized({}, TINY))
MODES = {  # the settings of optimizer, and the recipe
    "BF16, masters on the host": ("masters", "bf16"),
    "rowwise, masters on the host": ("masters", "rowwise"),
    "BF16, FSDP2's offload": ("offload", "bf16"),
}
KINDS: dict[str, tuple[dict[str, Any], int, int]] = {  # settings, rounds, and steps of a turn
    "clipped": ({}, *sized((3, 2), (1, 1))),
    "unclipped": ({"clip": 0.0}, *sized((1, 2), (1, 1))),
    "accumulated": ({"accumulate": 4}, 1, 1),
}


@torch.no_grad()
def fill(t: Any, *args: Any, **kwargs: Any) -> None:
    """Numbers of a pool in place of drawn ones, which take one core 20 seconds for each billion."""
    for part in () if t.is_meta else torch.split(local_part(t).view(-1), POOL.numel()):
        part.copy_(POOL[: part.numel()])


POOL: Tensor = 0.02 * torch.randn(sized(1 << 24, 1 << 12), generator=torch.Generator().manual_seed(0))


def begin(stack: ExitStack, way: str) -> Trainer:
    """A run of `rowwise` with the masters on the host, or offloaded by FSDP2; its weights are those of the pool."""
    chosen = {"optimizer.offload": True, "recipe": "bf16"} if way == "offload" else {"optimizer.masters": "host"}
    config = BASE.change(recipe="rowwise").change(
        out=stack.enter_context(tempfile.TemporaryDirectory()) + "/run", **chosen
    )
    with mock.patch("torch.nn.init.normal_", fill), mock.patch("torch.nn.init.kaiming_uniform_", fill):
        trainer = start_run(config, training_console())
    stack.enter_context(trainer.lock)
    return trainer


def choose(trainer: Trainer, recipe: str, settings: dict[str, Any]) -> None:
    """Let the layers of a run compute by another recipe, and the run have other settings."""
    trainer.config = trainer.config.change(accumulate=1, clip=1.0).change(**settings)
    if (hosted := trainer.state.hosted) is not None:
        hosted.accumulate, hosted.at_once = trainer.config.accumulate, trainer.config.clip == 0
        for layer in trainer.model.modules():
            if isinstance(layer, Linear):
                layer.recipe = get_recipe(recipe)


def finish(trainer: Trainer) -> None:
    """Wait for the updates of the last step, and for the GPU."""
    if trainer.state.hosted is not None:
        trainer.state.hosted.wait()
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(trainer: Trainer, steps: int) -> float:
    finish(trainer)
    began = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    finish(trainer)
    return (time.perf_counter() - began) / steps


def peak_of(call: Callable[[], float], times: list[float]) -> int:
    """The most bytes that the GPU has for tensors during a call, whose time is noted; 0 without a GPU."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times.append(call())
    return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0


def host_bytes() -> int:
    """The memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@benchmark()
def main(options: Options) -> Results:
    """Measure, and write what there is after each turn."""
    with ExitStack() as stack:
        stack.enter_context(collect_between_steps())
        trainers: dict[str, Trainer] = {}
        host: dict[str, int] = {}
        before = host_bytes()
        for way in ("masters", "offload"):
            trainers[way] = begin(stack, way)
            trainers[way].step()  # which touches all memory
            finish(trainers[way])
            host[way] = host_bytes() - before - sum(host.values())
            show(f"{way}: {host[way] / 1e9:.1f} GB of the host")
        losses: dict[str, float] = {}
        rows = [dict[str, Any](mode=mode, host_bytes=host[way]) for mode, (way, _) in MODES.items()]
        result = {"rows": rows, "tokens": BASE.batch * BASE.context, "cores": torch.get_num_threads(), "losses": losses}
        for kind, (settings, rounds, steps) in KINDS.items():
            times: dict[str, list[float]] = {mode: [] for mode in MODES}
            for row, (mode, (way, recipe)) in islice(cycle(zip(rows, MODES.items(), strict=True)), rounds * len(MODES)):
                trainer = trainers[way]
                choose(trainer, recipe, settings)
                if mode not in losses:  # of weights that moved by one step alike
                    losses[mode] = trainer.evaluate()
                    assert abs(losses[mode] / losses[next(iter(MODES))] - 1) < 0.01, losses
                    timed(trainer, 1)  # compiles
                with trainer.state.on_device():  # the weights as this recipe reads them
                    pass
                peak = peak_of(partial(timed, trainer, steps), times[mode])
                seconds = statistics.median(times[mode])
                tokens = trainer.config.accumulate * BASE.batch * BASE.context / seconds
                row[kind] = {"seconds": seconds, "tokens_per_second": tokens, "peak_bytes": peak}
                show(f"{kind}, {mode}: {times[mode][-1]:.3f} s, {peak / 1e9:.1f} GB")
                yield "gpu_offload", result


if __name__ == "__main__":
    main()
