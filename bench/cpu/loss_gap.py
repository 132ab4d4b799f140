"""The final loss of FP8 training against BF16's, on the demo's model and text with three seeds, and the packed model's.

For each seed both runs start from the same weights and see the same batches. The result holds every evaluation, the
relative gap of the last evaluation for each seed, the mean gap, and the spread between the BF16 seeds.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

from bench import record
from examples import demo
from octavo.artifact.run import RunFolder
from octavo.packing import pack
from octavo.runtime import load_packed
from octavo.train.config import Config
from octavo.train.evaluation import mean_loss
from octavo.train.finished import held_out
from octavo.train.records import read_run
from octavo.train.run_settings import read_settings
from octavo.train.start import start_run

SEEDS = (0, 1, 2)
RECIPES = ("bf16", "rowwise")


def main() -> None:
    runs: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        for seed in SEEDS:
            for recipe in RECIPES:
                runs.append(train(recipe, seed, Path(folder)))
                print(f"{recipe:8} seed {seed}: {runs[-1]['final']:.4f}", flush=True)
        packed = [judge(Path(folder), seed, runs) for seed in SEEDS]
    final = {recipe: [run["final"] for run in runs if run["recipe"] == recipe] for recipe in RECIPES}
    gaps = [fp8 / bf16 - 1 for bf16, fp8 in zip(*final.values(), strict=True)]
    spread = (max(final["bf16"]) - min(final["bf16"])) / statistics.mean(final["bf16"])
    summary = {"gaps": gaps, "mean_gap": statistics.mean(gaps), "bf16_spread": spread, "packed": packed}
    print(json.dumps(summary, indent=2))
    print(record.write("loss_gap", {"settings": demo.SETTINGS, "runs": runs, **summary}))


def name(folder: Path, recipe: str, seed: int) -> Path:
    return folder / f"{recipe}-{seed}"


def train(recipe: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train the demo once; returns the evaluation losses by step."""
    out = name(folder, recipe, seed)
    overrides = [*demo.SETTINGS, "--recipe", recipe, "--seed", str(seed), "--out", str(out), "--device", "cpu"]
    if signal := start_run(Config.load(None, overrides), Console(quiet=True)).run().interrupted:
        raise SystemExit(f"{signal}: no result is written")
    losses = read_run(out).evaluations
    return {"recipe": recipe, "seed": seed, "evaluations": losses, "final": list(losses.values())[-1]}


def judge(folder: Path, seed: int, runs: list[dict[str, Any]]) -> dict[str, float]:
    """Pack the FP8 run of a seed; returns the loss of the packed model and the size of its weights."""
    run = name(folder, "rowwise", seed)
    report = pack(run, folder / f"packed-{seed}")
    model, tokenizer, _ = load_packed(report.folder)
    count = read_settings(RunFolder(run)).evaluate_batches
    loss, _ = mean_loss(model, held_out(run, tokenizer)[0], torch.device("cpu"), precision="fp32", count=count)
    trained = next(r["final"] for r in runs if r["recipe"] == "rowwise" and r["seed"] == seed)
    return {"loss": loss, "to_trained": loss / trained - 1, "bytes_to_bf16": report.ratio}


if __name__ == "__main__":
    main()
