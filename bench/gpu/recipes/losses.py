"""The loss of a small Llama at the end of training with each recipe, over seeds.

A worker is a process on one GPU. It takes recipes from a queue and trains all seeds with each, so that a recipe is
compiled once. Several workers share a GPU, because a small model leaves it idle while the host launches kernels.
"""

import json
import math
import multiprocessing
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import record
from bench.gpu.gpt_parity import settings
from bench.gpu.gpt_trainer import CONFIG, Data, restart, trainer_of
from bench.gpu.pretrain import curve, shared_data
from bench.gpu.recipes.variants import CONTROL, implementations, recipe_of
from octavo.nn import cast_once
from octavo.train.blocks import eager
from octavo.train.config import Config
from octavo.train.loop import Trainer

GPU = CONFIG.change(
    model="llama", layers=6, width=512, heads=8, kv_heads=8, mlp_width=1536, context=512, tied=True, vocabulary=8192,
    batch=32, accumulate=1, steps=500, learning_rate=1e-3, min_learning_rate=1e-5, warmup=40, evaluate_batches=48,
    validation_fraction=0.08,
)  # fmt: skip
CPU = GPU.change(
    layers=2, width=128, heads=4, kv_heads=4, mlp_width=256, context=64, vocabulary=512, batch=16, steps=60,
    learning_rate=1e-3, min_learning_rate=1e-5, warmup=10, evaluate_batches=64, compile=False,
)  # fmt: skip
CHARACTERS = {"cuda": 45_000_000, "cpu": 3_000_000}  # of the text
TOKENS = "tokens.npz"


def train_all(
    names: Sequence[str], seeds: Sequence[int], config: Config, out: Path, deadline: float, processes: int
) -> None:
    """Train each recipe with each seed, without the runs that `out` holds, in `processes` workers on each GPU.

    One worker alone is this process.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    todo = [name for name in names if any(not path_of(out, name, seed).exists() for seed in seeds)]
    todo.sort(key=lambda name: "emulated" not in implementations(name, device).values())  # the longest first
    data = tokens_of(config, out)  # made once, before the workers read them
    workers = max(torch.cuda.device_count(), 1) * processes
    if workers == 1:
        for name in todo:
            train_seeds(name, seeds, config, data, out, deadline)
        return
    context = multiprocessing.get_context("spawn")
    jobs: Any = context.Queue()
    for job in (*todo, *[None] * workers):
        jobs.put(job)
    started = [context.Process(target=work, args=(i, jobs, seeds, config, out, deadline)) for i in range(workers)]
    for worker in started:
        worker.start()
    for worker in started:
        worker.join()


def work(index: int, jobs: Any, seeds: Sequence[int], config: Config, out: Path, deadline: float) -> None:
    """Train the recipes that come from `jobs`, until None comes. The workers have the GPUs in turn."""
    if torch.cuda.is_available():
        torch.cuda.set_device(index % torch.cuda.device_count())
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64
    data = tokens_of(config, out)
    while (name := jobs.get()) is not None:
        try:
            train_seeds(name, seeds, config, data, out, deadline)
        except Exception:  # a recipe that does not run must not end the others; it has no row in the table
            print(f"{name} failed:\n{traceback.format_exc()}", flush=True)


def train_seeds(name: str, seeds: Sequence[int], config: Config, data: Data, out: Path, deadline: float) -> None:
    """Train a recipe with each seed whose run is not in `out`, until `deadline`; writes a file for each run."""
    torch._dynamo.reset()  # the recipes share the code of their blocks
    trainer, converted = trainer_of(recipe_of(name), config, data)
    for seed in seeds:
        path, began = path_of(out, name, seed), time.monotonic()
        if path.exists() or began > deadline:
            continue
        restart(trainer, data, seed)
        if name == CONTROL:
            round_weights(trainer)
        facts = {"machine": record.facts(), "mode": name, "seed": seed, "settings": settings(config)}
        facts |= {"corpus": {"fingerprint": data.corpus.fingerprint, "train_tokens": len(data.corpus.train)}}
        facts |= {"converted": converted, "gemms": implementations(name, trainer.state.device)}
        run = train(trainer)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(facts | run, indent=2) + "\n")
        part.rename(path)  # whole, or not there
        print(f"{name}:{seed} ends at {run['final']} after {time.monotonic() - began:.0f} s", flush=True)


@torch.no_grad()
def round_weights(trainer: Trainer) -> None:
    for p in trainer.model.parameters():
        p.copy_(p.to(torch.bfloat16))


def train(trainer: Trainer) -> dict[str, Any]:
    """One run: its loss curve, and its final loss on text held out, None if that is not finite."""
    with cast_once(trainer.model):
        losses = torch.stack([trainer.step()[0] for _ in range(trainer.config.steps)]).tolist()
        with eager():  # compiling another graph of each recipe takes longer
            final = trainer.evaluate()
    finite = all(map(math.isfinite, losses))
    return {"curve": curve(losses) if finite else None, "final": final if math.isfinite(final) else None}


def path_of(out: Path, name: str, seed: int) -> Path:
    return out / f"{name}-{seed}.json"


def tokens_of(config: Config, out: Path) -> Data:
    """The tokens in `out`, which are made of the text on this machine if they are not there."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return shared_data(config, out / TOKENS, rank=0, characters=CHARACTERS[kind])
