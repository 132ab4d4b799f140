"""Does a model trained in FP8 end where BF16 ends, and what does a step cost? On one GPU.

The model is a GPT of 124 million parameters, or with `--model moe` a mixture of experts of 90 million.

The text is the Python source on the machine itself (the standard library and the installed packages), so nothing is
downloaded. For each seed every mode starts from the same weights and sees the same batches. The gap of a run is its
final loss over that of BF16 with the same seed, less 1; the interval of the mean gap over seeds is Student's.

A mode is a recipe of octavo, or torchao; `_if_faster` at its end stands for `only_if_faster`. Each run writes one file
to --out, and a run whose file is there is skipped, so a long measurement can be done in several calls:

    python -m bench.gpu.gpt_parity --time bf16,rowwise,torchao --out FOLDER                    steps, in turns
    python -m bench.gpu.gpt_parity --runs bf16:0,rowwise:0 --steps 400 --seconds 560 --out FOLDER        MODE:SEED
    python -m bench.gpu.gpt_parity --merge FOLDER              all files below FOLDER to bench/results/gpt_parity.json

The result of a mixture is bench/results/moe_parity.json.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench import record
from bench.gpu.gpt_trainer import MODELS, Data, gradient_errors, make_trainer, random_data, read_data, restart
from bench.gpu.timing import interleaved, summary
from octavo.evaluation.metrics import ratio
from octavo.nn import cast_once
from octavo.train.config import Config
from octavo.train.loop import Trainer

SETTINGS = ("layers", "width", "heads", "context", "vocabulary", "batch", "accumulate", "steps", "learning_rate")
CURVE_STEPS = 10  # a point of the loss curve is the mean of so many steps


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--runs", metavar="MODE:SEED,...", help="runs to train, in this order")
    parser.add_argument("--time", metavar="MODES", help="modes whose steps to time; the first is the base")
    parser.add_argument("--merge", type=Path, metavar="FOLDER", help="combine the files below FOLDER")
    parser.add_argument("--steps", type=int, help="optimizer steps of a run")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no run that would end later")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt_parity"), help="folder of the files")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    config = MODELS[options.model]
    config = config.change(steps=options.steps or config.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.time:
        result = time_steps(options.time.split(","), config)
        (options.out / "steps.json").write_text(json.dumps(result, indent=2) + "\n")
    if options.runs:
        plan = [(mode, int(seed)) for mode, _, seed in (run.partition(":") for run in options.runs.split(","))]
        train_all(plan, config, read_data(config), options.out, began + options.seconds)
    if options.merge:
        print(record.write(f"{options.model}_parity", merge(options.merge)))


# --- Training --------------------------------------------------------------------------------------------------


def train_all(plan: Sequence[tuple[str, int]], config: Config, data: Data, out: Path, deadline: float) -> None:
    """The runs (mode, seed) in order, without those that `out` holds.

    No run is started that, lasting as long as the longest before it, would end after `deadline`.
    """
    trainers: dict[str, tuple[Trainer, int]] = {}
    longest = 0.0
    for mode, seed in plan:
        path = out / f"{mode}-{seed}.json"
        if path.exists():
            continue
        began = time.monotonic()
        if began + longest > deadline:
            print(f"{mode}:{seed} and the runs after it are not started: one takes {longest:.0f} s", flush=True)
            return
        trainer, converted = trainers[mode] = trainers.get(mode) or make_trainer(mode, config, data)
        restart(trainer, data, seed)
        facts = {"machine": record.facts(), "mode": mode, "seed": seed, "settings": settings(config)}
        result = {**facts, "converted": converted, **train(trainer)}
        path.write_text(json.dumps(result, indent=2) + "\n")
        longest = max(longest, time.monotonic() - began)
        print(f"{mode}:{seed} ends at {result['final']:.4f} after {time.monotonic() - began:.0f} s", flush=True)


def train(trainer: Trainer) -> dict[str, Any]:
    """One run: its loss curve and its final loss on text held out."""
    config = trainer.config
    with cast_once(trainer.model):
        losses = torch.stack([trainer.step()[0] for _ in range(config.steps)]).tolist()
        final = trainer.evaluate()
    if not math.isfinite(final):
        raise RuntimeError(f"the run has diverged: its final loss is {final}")
    tokens = config.steps * config.batch * config.accumulate * config.context
    return {
        "corpus": {"fingerprint": trainer.state.fingerprint},
        "tokens": tokens,
        "epochs": tokens / (trainer.data.training.sequences * config.context),
        "curve": [statistics.fmean(losses[i : i + CURVE_STEPS]) for i in range(0, len(losses), CURVE_STEPS)],
        "final": final,
    }


def settings(config: Config) -> dict[str, Any]:
    mixture = {"mlp_width": config.mlp_width, "experts": asdict(config.experts)} if config.model == "mixture" else {}
    return {name: getattr(config, name) for name in SETTINGS} | mixture


# --- Step times ------------------------------------------------------------------------------------------------


def time_steps(modes: Sequence[str], config: Config) -> dict[str, Any]:
    """Milliseconds of a whole optimizer step, the modes taking turns in one process."""
    data = random_data(config)
    trainers = {mode: make_trainer(mode, config, data) for mode in modes}  # torchao last: it patches Inductor
    errors = gradient_errors(trainers, data)
    with ExitStack() as stack:
        for trainer, _ in trainers.values():
            stack.enter_context(cast_once(trainer.model))
        times = interleaved({mode: trainer.step for mode, (trainer, _) in trainers.items()}, rounds=12, repeat=3)
    base = summary(times[modes[0]])["median"]
    rows = []
    for mode, (_, converted) in trainers.items():
        found = summary(times[mode])
        row = {"mode": mode, "converted": converted, "milliseconds": found["median"], "ratio": found["median"] / base}
        rows.append(row | {"quartiles": [found["low"], found["high"]], "gradient_error": errors.get(mode)})
        print(f"{mode:18} {found['median']:7.1f} ms  {found['median'] / base:.3f} of {modes[0]}", flush=True)
    return {"machine": record.facts(), "settings": settings(config), "base": modes[0], "steps": rows}


# --- The result ------------------------------------------------------------------------------------------------


def merge(folder: Path) -> dict[str, Any]:
    """The files below `folder` as one result: the runs, the gaps of each mode, and steps.json where it is there."""
    files = {path: json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))}
    runs = [content for content in files.values() if "seed" in content]
    final = {(run["mode"], run["seed"]): run["final"] for run in runs}
    bf16 = [loss for (mode, _), loss in final.items() if mode == "bf16"]
    if not bf16 or len(final) < len(runs):
        raise ValueError(f"{folder} must hold each run once, those of bf16 among them; it holds {sorted(final)}")
    check_alike(runs)
    modes = sorted({mode for mode, seed in final if ("bf16", seed) in final} - {"bf16"})
    shared = ("machine", "settings", "corpus", "tokens", "epochs")
    return {
        **{key: runs[0][key] for key in shared},
        "runs": [{key: value for key, value in run.items() if key not in shared} for run in runs],
        "gaps": {mode: gaps(final, mode) for mode in modes},
        "bf16_spread": (max(bf16) - min(bf16)) / statistics.mean(bf16),
        "step_times": next((content for path, content in files.items() if path.name == "steps.json"), None),
    }


def check_alike(runs: Sequence[Mapping[str, Any]], keys: Sequence[str] = ("settings", "corpus")) -> None:
    """Raise a ValueError unless all runs have the same settings and text."""
    for run in runs:
        for key in keys:
            if run[key] != runs[0][key]:
                raise ValueError(f"all runs must have the same {key}; {run['mode']}:{run['seed']} has {run[key]}")


def gaps(final: dict[tuple[str, int], float], mode: str) -> dict[str, Any]:
    """The relative gaps of a mode by seed, their mean and its 95 % interval (None with one seed)."""
    seeds = sorted(seed for each, seed in final if each == mode and ("bf16", seed) in final)
    by_seed = [final[mode, seed] / final["bf16", seed] - 1 for seed in seeds]
    mean = ratio(by_seed, [1.0] * len(by_seed))
    interval = None if mean.low is None else [mean.low, mean.high]
    return {"seeds": seeds, "gaps": by_seed, "mean": mean.value, "interval": interval}


if __name__ == "__main__":
    main()
