"""The main job from end to end, as a user would type it: `make demo`.

Doctor; a small Llama on the text of Python's standard library, trained in BF16 and in FP8 from the same seed and on the
same batches; the gap of their losses; the FP8 model packed; its sizes and loss; text generated from the packed bytes.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from octavo import serve
from octavo.artifact.run import RunFolder
from octavo.text import read_text
from octavo.train.config import Config
from octavo.train.data import Batches, build_corpus

RUNS = Path("runs/demo")
SETTINGS = ["--steps", "200", "--evaluate-every", "50", "--evaluate-batches", "24", "--log-every", "25"]


def main() -> None:
    began = time.perf_counter()
    shutil.rmtree(RUNS, ignore_errors=True)
    octavo("doctor")
    for recipe in ("bf16", "rowwise"):
        octavo("train", "--recipe", recipe, "--out", str(RUNS / recipe), *SETTINGS)
    compare()
    octavo("pack", str(RUNS / "rowwise"), str(RUNS / "packed"))
    judge_packed()
    octavo("generate", str(RUNS / "packed"), "--prompt", "    def ", "--count", "240", "--seed", "1")
    print(f"\nthe whole demo took {time.perf_counter() - began:.0f} s")


def octavo(*arguments: str) -> None:
    """Run a command of octavo in a process of its own, shown as one would type it."""
    print(f"\n$ octavo {shlex.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "octavo", *arguments], check=True)


def compare() -> None:
    """Both runs side by side."""
    losses = {recipe: evaluations(RUNS / recipe) for recipe in ("bf16", "rowwise")}
    print("\n  step   BF16 loss   FP8 loss       gap")
    for step, bf16 in losses["bf16"].items():
        fp8 = losses["rowwise"][step]
        print(f"{step:6d}   {bf16:9.4f}  {fp8:9.4f}  {fp8 / bf16 - 1:+8.2%}")


def evaluations(run: Path) -> dict[int, float]:
    """Step -> evaluation loss, from what the run logged."""
    records = [json.loads(line) for line in RunFolder(run).metrics.read_text().splitlines()]
    return {record["step"]: record["evaluation_loss"] for record in records if "evaluation_loss" in record}


def judge_packed() -> None:
    """The loss of the packed model on the text that was held out, against that of the run it came from."""
    run = RunFolder(RUNS / "rowwise")
    trained = list(evaluations(run.path).values())[-1]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    packed = packed_loss(RUNS / "packed", Config.from_dict(json.loads(run.config.read_text())), device)
    print(f"evaluation loss: FP8 run {trained:.4f}, packed model {packed:.4f} ({packed / trained - 1:+.2%})")


@torch.inference_mode()
def packed_loss(folder: Path, config: Config, device: str) -> float:
    """The mean loss of a packed model over the batches that its run evaluated on."""
    model, tokenizer, _ = serve.load(folder, device)
    corpus = build_corpus(read_text(config.data).texts, tokenizer, config.context, config.validation_fraction)
    batches = Batches(corpus.validation, config.context, config.batch, seed=None)
    losses = []
    for index in range(config.evaluate_batches):
        inputs, targets = (t.to(device) for t in batches.at(index))
        losses.append(F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten()))
    return float(torch.stack(losses).mean())


if __name__ == "__main__":
    main()
