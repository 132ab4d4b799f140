"""The final loss of FP8 training against BF16's, on the demo's model and text with three seeds, and the packed model's.

For each seed both runs start from the same weights and see the same batches. The result holds every evaluation, the
relative gap of the last evaluation for each seed, the mean gap, and the spread between the BF16 seeds.
"""

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from bench.gpu.harness import Options, Results, benchmark, show
from examples import demo
from octavo.inference.opening import load_packed
from octavo.packing import pack
from octavo.train.config import Config
from octavo.train.finished import held_out
from octavo.train.loss import mean_loss
from octavo.train.run_records import read_runs
from octavo.train.settings import load_config
from octavo.train.trainer import start_run

SEEDS = (0, 1, 2)
RECIPES = ("bf16", "rowwise")  # the last is packed


def train(out: Path, *overrides: str) -> Config:
    """Train the demo in the folder `out`, with other settings as `--key value`."""
    config = load_config(None, [*demo.SETTINGS, "--out", str(out), "--device", "cpu", *overrides])
    if signal := start_run(config, Console(quiet=True)).run().interrupted:
        raise SystemExit(f"{signal}: no result is written")
    return config


def judge(run: Path, trained: float) -> dict[str, float]:
    """Pack a run whose final loss is `trained`; returns the loss of the packed model and the size of its weights."""
    report = pack(run, run.with_name(f"{run.name} packed"))
    packed = load_packed(report.folder)
    batches, count, _ = held_out(run, packed)
    loss, _ = mean_loss(packed.model, batches, torch.device("cpu"), precision="fp32", count=count)
    return {"loss": loss, "to_trained": loss / trained - 1, "bytes_to_bf16": report.ratio}


@benchmark()
def main(_: Options) -> Results:
    runs: list[dict[str, Any]] = []
    packed: list[dict[str, float]] = []
    with TemporaryDirectory() as name:
        for seed in SEEDS:
            for recipe in RECIPES:
                run = Path(name, f"{recipe}-{seed}")
                train(run, "--recipe", recipe, "--seed", str(seed))
                losses = read_runs([run])[0].evaluations
                final = list(losses.values())[-1]
                runs.append({"recipe": recipe, "seed": seed, "evaluations": losses, "final": final})
                show(f"{recipe:8} seed {seed}: {final:.4f}")
            packed.append(judge(run, final))
    bf16, fp8 = ([run["final"] for run in runs if run["recipe"] == recipe] for recipe in RECIPES)
    gaps = [ours / base - 1 for base, ours in zip(bf16, fp8, strict=True)]
    spread = (max(bf16) - min(bf16)) / statistics.mean(bf16)
    summary = {"gaps": gaps, "mean_gap": statistics.mean(gaps), "bf16_spread": spread, "packed": packed}
    show(summary)
    yield "loss_gap", {"settings": demo.SETTINGS, "runs": runs, **summary}
