"""Steps with masters and AdamW on the host: BF16 and FP8 beside FSDP2's offload of one process.

A Llama of Llama-3.2-3B's blocks, 16,384 tokens a step, and four micro-batches of them; with clipping, and without,
where a weight is updated during the backward pass. The modes take turns, a few whole steps at a time, and a figure is
the median of the rounds. BF16 and `rowwise` share their masters. Before that all modes compute one loss.

    python -m bench.gpu.offload        about two minutes on a GPU with 32 cores and 256 GB of memory
"""

import statistics
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.gpu.harness import DEVICE, Options, Results, allocated, benchmark, peak_of, show, sized
from bench.gpu.plan import MODELS
from octavo.nn.linear import Linear
from octavo.nn.parallel_weights import local_part
from octavo.recipe import get_recipe
from octavo.train.processes import collect_between_steps, training_console
from octavo.train.trainer import Trainer, start_run

TINY = {"layers": 2, "width": 64, "heads": 2, "kv_heads": 1, "mlp_width": 128, "context": 32, "compile.blocks": False}
BASE = MODELS["3b"].change(batch=4, device=DEVICE, **{"watch.interval": 0}, **sized({}, TINY))
WAYS: dict[str, dict[str, Any]] = {
    "host": {"optimizer.masters": "host", "recipe": "rowwise"},
    "FSDP2": {"optimizer.offload": True, "recipe": "bf16"},
}
MODES = {  # the run and its recipe
    "BF16, masters on the host": ("host", "bf16"),
    "rowwise, masters on the host": ("host", "rowwise"),
    "BF16, FSDP2's offload": ("FSDP2", "bf16"),
}
KINDS: dict[str, tuple[dict[str, Any], int, int]] = {  # settings, rounds, and steps of a turn
    "clipped": ({}, *sized((3, 2), (1, 1))),
    "unclipped": ({"clip": 0.0}, 1, sized(2, 1)),
    "accumulated": ({"accumulate": 4}, 1, 1),
}
POOL = 0.02 * torch.randn(sized(1 << 24, 1 << 12), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def fill(t: Any, *args: Any, **kwargs: Any) -> None:
    """Numbers of a pool in place of drawn ones, which take one core 20 seconds for each billion."""
    for part in () if t.is_meta else torch.split(local_part(t).view(-1), POOL.numel()):
        part.copy_(POOL[: part.numel()])


def begin(stack: ExitStack, way: str) -> tuple[Trainer, int, int]:
    """A run after a first step, which touches all its memory, and the bytes of host and GPU that it keeps."""
    before, held, out = host_bytes(), allocated(), stack.enter_context(tempfile.TemporaryDirectory())
    with mock.patch("torch.nn.init.normal_", fill), mock.patch("torch.nn.init.kaiming_uniform_", fill):
        trainer = start_run(BASE.change(out=f"{out}/run", **WAYS[way]), training_console())
    stack.enter_context(trainer.lock)
    show(f"{way}: {timed(trainer, 1, []):.1f} s of the first step")
    return trainer, host_bytes() - before, allocated() - held


def host_bytes() -> int:
    """The memory of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def choose(trainer: Trainer, recipe: str, settings: dict[str, Any]) -> None:
    """Let the layers of a run compute by another recipe, and the run have other settings."""
    trainer.config = trainer.config.change(accumulate=1, clip=1.0).change(**settings)
    if (hosted := trainer.state.hosted) is not None:
        hosted.accumulate, hosted.at_once = trainer.config.accumulate, trainer.config.clip == 0
        for layer in (module for module in trainer.model.modules() if isinstance(module, Linear)):
            layer.recipe = get_recipe(recipe)
        with trainer.state.on_device():  # holds the weights as this recipe reads them
            pass


def timed(trainer: Trainer, steps: int, times: list[float]) -> float:
    """Seconds a step, until the last weight is updated; it is added to `times` too."""
    began = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    trainer.state.wait()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    times.append((time.perf_counter() - began) / steps)
    return times[-1]


@benchmark()
def main(options: Options) -> Results:
    """Measure, and write what there is after each turn."""
    with ExitStack() as stack:
        stack.enter_context(collect_between_steps())
        runs = {way: begin(stack, way) for way in WAYS}
        rows = {mode: dict[str, Any](mode=mode, host_bytes=runs[way][1]) for mode, (way, _) in MODES.items()}
        tokens, losses = BASE.batch * BASE.context, dict[str, float]()
        result = {"tokens": tokens, "cores": torch.get_num_threads(), "losses": losses, "rows": list(rows.values())}
        for mode, (way, recipe) in MODES.items():
            choose(runs[way][0], recipe, {})
            losses[mode] = runs[way][0].evaluate()  # after one step by FP8 and one by BF16
            assert abs(losses[mode] / next(iter(losses.values())) - 1) < 0.01, losses
        for mode, (way, recipe) in MODES.items():
            choose(runs[way][0], recipe, {})
            show(f"{mode}: {timed(runs[way][0], 1, []):.1f} s of a step that compiles")
        for kind, (settings, rounds, steps) in KINDS.items():
            times: dict[str, list[float]] = {mode: [] for mode in MODES}
            for _, (mode, (way, recipe)) in product(range(rounds), MODES.items()):
                choose(trainer := runs[way][0], recipe, settings)
                held = runs["FSDP2"][2]
                others = held if way == "host" else allocated() - held  # of the run that waits
                peak = peak_of(partial(timed, trainer, steps, times[mode]), others, warmup=0)
                seconds = statistics.median(times[mode])
                rate = trainer.config.accumulate * tokens / seconds
                rows[mode][kind] = {"seconds": seconds, "tokens_per_second": rate, "peak_bytes": peak}
                show(f"{kind}, {mode}: {times[mode][-1]:.3f} s, {peak / 1e9:.1f} GB")
                yield "gpu_offload", result
