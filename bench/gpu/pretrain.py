"""Llamas of 300 million and of a billion parameters, trained on text in BF16 and in FP8: losses, speed and memory.

The text is source code and documentation on the machine itself (Python's standard library and the installed packages),
so nothing is downloaded. For each seed all modes start from the same weights and see the same batches. A process trains
on one GPU, and takes every n-th run of the list if torchrun starts n of them; they exchange nothing but the tokens.

A run's file is written at each evaluation. A run that does not end in time is not resumed: the other runs of its seed
are compared with it at the last step that all have reached. With `--stop` runs end early, on the schedule of all steps.
Many seeds of the first steps cost as much as one whole run.

    torchrun --nproc-per-node 2 -m bench.gpu.pretrain --model 300m --runs bf16:0,rowwise:0 --seconds 560 --out FOLDER
    python -m bench.gpu.pretrain --merge FOLDER      FOLDER to bench/results/pretrain_MODEL.json, or _MODEL_STEP.json
"""

import argparse
import json
import math
import os
import statistics
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import record
from bench.gpu.gpt_parity import CURVE_STEPS, check_alike, gaps, settings
from bench.gpu.gpt_trainer import CONFIG, Data, make_trainer, read_data, restart
from octavo.models.tokenizer import ByteTokenizer
from octavo.nn import cast_once
from octavo.text import ReadReport
from octavo.train.config import Config
from octavo.train.data import Corpus
from octavo.train.loop import Trainer

LLAMA = CONFIG.change(
    model="llama", context=2048, vocabulary=50_257, steps=768, warmup=40, evaluate_batches=16
)  # fmt: skip
CONFIGS = {  # 131,072 tokens a step: 101 million in a run
    "300m": LLAMA.change(  # 309 million parameters, a third of them in the embedding and the head
        layers=16, width=1024, heads=16, kv_heads=16, mlp_width=2816, tied=False, batch=16, accumulate=4,
        learning_rate=6e-4, min_learning_rate=6e-5,
    ),
    "1b": LLAMA.change(
        layers=16, width=2048, heads=32, kv_heads=8, mlp_width=8192, tied=True, batch=8, accumulate=8,
        learning_rate=4e-4, min_learning_rate=4e-5,
    ),
}  # fmt: skip
CHARACTERS = 400_000_000  # 104 million tokens: no token comes twice
SUFFIXES = ("py", "pyi", "rst", "md", "txt", "h", "hpp", "cuh", "js")
EVALUATIONS = 16  # in a run

Run = tuple[str, int]  # its mode and its seed


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CONFIGS, default="300m")
    parser.add_argument("--runs", metavar="MODE:SEED,...", default="", help="runs to train, in this order")
    parser.add_argument("--steps", type=int, default=LLAMA.steps, help="optimizer steps of a run")
    parser.add_argument("--stop", type=int, help="end each run after this step of its schedule")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end the run in progress after so long")
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain"), help="folder of the files")
    parser.add_argument("--merge", type=Path, metavar="FOLDER", help="combine the files below FOLDER")
    options = parser.parse_args()
    if options.merge:
        result = merge(options.merge)
        print(record.write(name_of(result), result))
        return
    torch._dynamo.config.recompile_limit = 64
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    config = CONFIGS[options.model].change(steps=options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    data = shared_data(config, options.out / "tokens.npz", rank)
    plan = [(mode, int(seed)) for mode, _, seed in (run.partition(":") for run in options.runs.split(",") if run)]
    stop = options.stop or config.steps
    train_all(options.model, plan[rank::world], config, data, options.out, began + options.seconds, stop)


# --- Data ------------------------------------------------------------------------------------------------------


def shared_data(config: Config, path: Path, rank: int, characters: int = CHARACTERS) -> Data:
    """The tokens in `path`; rank 0 makes the file if it is not there, and the others wait for it."""
    if rank == 0 and not path.exists():
        folder = sysconfig.get_path("purelib")
        sources = ["stdlib", *(f"{folder}/**/*.{suffix}" for suffix in SUFFIXES)]
        save_tokens(read_data(config, sources, characters).corpus, path)
    while not path.exists():
        time.sleep(1)
    with np.load(path) as arrays:
        corpus = Corpus(arrays["train"], arrays["validation"], str(arrays["fingerprint"]))
    return Data(corpus, ByteTokenizer(), ReadReport((), 0, 0, 0, {}, ()))


def save_tokens(corpus: Corpus, path: Path) -> None:
    part = path.with_suffix(".part.npz")
    np.savez(part, train=corpus.train, validation=corpus.validation, fingerprint=np.array(corpus.fingerprint))
    part.rename(path)  # whole, or not there


# --- Training --------------------------------------------------------------------------------------------------


def train_all(model: str, plan: list[Run], config: Config, data: Data, out: Path, deadline: float, stop: int) -> None:
    """Train the runs in order to step `stop`, without those that have reached it in `out`, until `deadline`."""
    trainers: dict[str, tuple[Trainer, int]] = {}
    states: dict[str, int] = {}  # bytes of weights, gradients and optimizer
    for mode, seed in plan:
        path = out / f"{mode}-{seed}.json"
        if time.monotonic() > deadline or last_step(path) >= stop:
            continue
        before = allocated()
        trainer, converted = trainers[mode] = trainers.get(mode) or make_trainer(mode, config, data)
        states.setdefault(mode, allocated() - before)
        others = sum(states.values()) - states[mode]
        facts = {"machine": record.facts(), "model": model, "mode": mode, "seed": seed, "settings": settings(config)}
        corpus = {"fingerprint": data.corpus.fingerprint, "train_tokens": len(data.corpus.train)}
        parameters = sum(p.numel() for p in trainer.model.parameters())
        facts |= {"corpus": corpus, "converted": converted, "parameters": parameters}
        with cast_once(trainer.model):
            trainer.step()  # compiles
            trainer.evaluate()
            restart(trainer, data, seed)
            for progress in train(trainer, deadline, stop):
                progress["peak_bytes"] -= others
                path.write_text(json.dumps(facts | progress, indent=2) + "\n")
                loss, speed = progress["evaluations"][-1]["loss"], progress["tokens_per_second"]
                print(f"{mode}:{seed}, step {trainer.state.step}: {loss:.4f}, {speed:.0f} tokens/s", flush=True)


def last_step(path: Path) -> int:
    """The step of the last evaluation in a run's file; 0 if there is no file."""
    return int(json.loads(path.read_text())["evaluations"][-1]["step"]) if path.exists() else 0


def train(trainer: Trainer, deadline: float, stop: int) -> Iterator[dict[str, Any]]:
    """Train to step `stop` or to `deadline`; gives the run so far, at each evaluation."""
    config, device = trainer.config, trainer.state.device
    every = max(config.steps // EVALUATIONS, 1)
    tokens = config.batch * config.accumulate * config.context
    losses: list[torch.Tensor] = []
    evaluations: list[dict[str, float]] = []
    seconds = 0.0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    while len(losses) < stop and time.monotonic() < deadline:
        began = time.perf_counter()
        losses += [trainer.step()[0] for _ in range(min(every, stop - len(losses)))]
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds += time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        loss = trainer.evaluate()
        if not math.isfinite(loss):
            raise RuntimeError(f"the run has diverged: its loss is {loss}")
        evaluations.append({"step": len(losses), "seconds": seconds, "loss": loss})
        yield {
            "whole": len(losses) == config.steps,
            "tokens": tokens * len(losses),
            "tokens_per_second": tokens * len(losses) / seconds,
            "peak_bytes": peak,
            "evaluations": evaluations,
            "curve": curve(torch.stack(losses).tolist()),
        }


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def curve(losses: list[float]) -> list[float]:
    """The means over CURVE_STEPS training losses each."""
    return [statistics.fmean(losses[i : i + CURVE_STEPS]) for i in range(0, len(losses), CURVE_STEPS)]


# --- The result ------------------------------------------------------------------------------------------------


def merge(folder: Path) -> dict[str, Any]:
    """The runs below `folder`, compared at the last evaluation that all of them have reached."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.rglob("*-*.json"))]
    if not any(run["mode"] == "bf16" for run in runs):
        raise ValueError(f"{folder} must hold runs, those of bf16 among them; it holds {len(runs)} others")
    shared = ("machine", "model", "settings", "corpus")
    check_alike(runs, shared[1:])
    last = min(len(run["evaluations"]) for run in runs) - 1
    compared = runs[0]["evaluations"][last]["step"]
    final = {(run["mode"], run["seed"]): run["evaluations"][last]["loss"] for run in runs}
    bf16 = [loss for (mode, _), loss in final.items() if mode == "bf16"]
    target = max(final.values())
    for run in runs:
        run["compared_loss"] = final[run["mode"], run["seed"]]
        run["seconds_to_target"] = seconds_to(target, run["evaluations"])
    modes = sorted({mode for mode, seed in final if ("bf16", seed) in final} - {"bf16"})
    return {
        **{key: runs[0][key] for key in shared},
        "compared_at_step": compared,
        "compared_tokens": compared * runs[0]["tokens"] // runs[0]["evaluations"][-1]["step"],
        "target": target,
        "gaps": {mode: gaps(final, mode) for mode in modes},
        "bf16_spread": (max(bf16) - min(bf16)) / statistics.mean(bf16) if len(bf16) > 1 else None,
        "runs": [{key: value for key, value in run.items() if key not in shared} for run in runs],
    }


def name_of(result: dict[str, Any]) -> str:
    """The name of the result's file. Runs that end early have another than whole runs."""
    step = result["compared_at_step"]
    return f"pretrain_{result['model']}" + (f"_{step}" if step < result["settings"]["steps"] else "")


def seconds_to(target: float, evaluations: list[dict[str, float]]) -> float | None:
    """The training time at which the loss reaches `target`, on straight lines between evaluations."""
    before: dict[str, float] | None = None
    for after in evaluations:
        if after["loss"] <= target:
            if before is None:
                return after["seconds"]
            share = (before["loss"] - target) / (before["loss"] - after["loss"])
            return before["seconds"] + share * (after["seconds"] - before["seconds"])
        before = after
    return None


if __name__ == "__main__":
    main()
