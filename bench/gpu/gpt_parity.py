"""Does a 124M GPT trained in FP8 end where BF16 ends, and what is a step of it worth? On one GPU, on real text.

For each seed every mode starts from the same weights and sees the same batches, so that the gap, final loss over BF16's
less 1, is paired; its 95 % interval over n seeds is mean ± t(n - 1) * s / sqrt(n). Beside it stands the spread between
the BF16 seeds. Every evaluation runs in the mode that is trained. A run is a file; --merge makes the result of all.

    gpt_parity --time-steps bf16,rowwise,torchao --out FOLDER                      interleaved step times
    gpt_parity --runs bf16:0,rowwise:0 --cache CORPUS --out FOLDER --deadline 560  training runs, MODE:SEED
    gpt_parity --merge FOLDER                                                      bench/results/gpt_parity.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import record
from bench.gpu import gpt_corpus
from bench.gpu.gpt_student import CONFIG, MODES, RANDOM_BATCHES, Student, check, random_batches, synchronize
from octavo.train.config import Config

SETTINGS = (  # those of a Config that are read here
    *("layers", "width", "heads", "context", "vocabulary", "tied", "batch", "steps", "learning_rate"),
    *("min_learning_rate", "schedule", "warmup", "weight_decay", "beta1", "beta2", "clip", "evaluate_every"),
    *("evaluate_batches", "precision", "compile"),
)
FINAL_BATCHES = 32  # of the last evaluation: 2.1 million tokens
CURVE_STEPS = 10  # steps that one point of the loss curve is the mean of
ROUNDS, ROUND_STEPS = 12, RANDOM_BATCHES  # of the step times
T_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # by freedom


def main() -> None:
    began = time.perf_counter()
    options = parse()
    if options.merge:
        print(merge(options.merge))
        return
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = dataclasses.replace(CONFIG, steps=options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.time_steps:
        result = time_steps(options.time_steps.split(","), config, device)
        (options.out / "steps.json").write_text(json.dumps(result, indent=2) + "\n")
    if options.runs:
        corpus = gpt_corpus.load_or_build(options.cache, gpt_corpus.installed(), gpt_corpus.Plan())
        plan = [(mode, int(seed)) for mode, _, seed in (run.partition(":") for run in options.runs.split(","))]
        if failed := train_all(plan, config, corpus, device, options.out, began + options.deadline):
            raise SystemExit(f"failed: {', '.join(failed)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-steps", metavar="MODES", help="modes to time, of " + ", ".join(MODES))
    parser.add_argument("--runs", help="MODE:SEED, in this order")
    parser.add_argument("--steps", type=int, default=CONFIG.steps, help="optimizer steps of a run")
    parser.add_argument("--cache", type=Path, default=Path("runs/gpt_corpus"), help="folder of the tokens")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds after which no run may end")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt_parity"), help="folder of the files")
    parser.add_argument("--merge", type=Path, metavar="FOLDER", help="combine the files below a folder")
    return parser.parse_args()


# --- Training --------------------------------------------------------------------------------------------------


def train_all(
    plan: Sequence[tuple[str, int]],
    config: Config,
    corpus: gpt_corpus.Corpus,
    device: torch.device,
    out: Path,
    deadline: float,
) -> list[str]:
    """The runs (mode, seed) in order, each written when it ends; a list of those that failed.

    Runs that `out` holds are left out. None is started that, lasting as long as the one before, would miss `deadline`.
    A mode that fails is left out from then on, for the others' sake: time on the machine is short.
    """
    students: dict[str, Student] = {}
    failed: list[str] = []
    compiling = training = 0.0  # seconds that the last of each took
    for mode, seed in plan:
        path = out / f"{mode}-{seed}.json"
        if path.exists() or any(name.startswith(f"{mode}:") for name in failed):
            continue
        needs = training + (0.0 if mode in students else compiling)
        if time.perf_counter() + needs > deadline:
            print(f"{mode}:{seed} and what follows is not started: it needs {needs:.0f} s", flush=True)
            break
        try:
            if mode not in students:
                students[mode] = Student(mode, config, device)
                compiling = students[mode].compile()
            began = time.perf_counter()
            result = train(students[mode], seed, corpus, device)
            training = time.perf_counter() - began
        except Exception:
            traceback.print_exc()
            failed.append(f"{mode}:{seed}")
            continue
        facts = {"machine": record.facts(), "mode": mode, "seed": seed, "settings": settings(config)}
        path.write_text(json.dumps({**facts, "compile_seconds": compiling, **result}, indent=2) + "\n")
        print(f"{mode}:{seed} ends at {result['final']:.4f} after {training:.0f} s", flush=True)
    return failed


def train(student: Student, seed: int, corpus: gpt_corpus.Corpus, device: torch.device) -> dict[str, Any]:
    """One run: its loss curve, its evaluations by step, and how fast it went."""
    config = student.config
    student.restart(seed)
    mark = student.weights_mark()
    batches = gpt_corpus.Batches(corpus.train, config, device, config.steps, seed)
    held_out = gpt_corpus.Batches(corpus.validation, config, device, FINAL_BATCHES, None)
    losses: list[Tensor] = []
    evaluations: dict[int, float] = {}
    seconds: list[float] = []  # a step, from one evaluation to the next
    synchronize(device)
    began = time.perf_counter()
    for index in range(config.steps):
        losses.append(student.step(index, *batches.at(index)))
        done = index + 1
        if done % config.evaluate_every == 0 or done == config.steps:
            synchronize(device)
            steps = done - max(evaluations, default=0)
            seconds.append((time.perf_counter() - began) / steps)
            count = FINAL_BATCHES if done == config.steps else config.evaluate_batches
            evaluations[done] = evaluate(student, held_out, count)
            print(f"  step {done}: {evaluations[done]:.4f}  {1e3 * seconds[-1]:.1f} ms a step", flush=True)
            began = time.perf_counter()
    curve = torch.stack(losses).tolist()
    return {
        "corpus": corpus.facts,
        "epochs": batches.epochs,
        "converted": len(student.converted),
        "initial_weights": mark,
        "curve": [statistics.fmean(curve[i : i + CURVE_STEPS]) for i in range(0, len(curve), CURVE_STEPS)],
        "evaluations": evaluations,
        "final": evaluations[config.steps],
        "tokens": config.steps * config.batch * config.context,
        "tokens_per_second": config.batch * config.context / statistics.median(seconds),
        "graph_breaks": graph_breaks(),
    }


def evaluate(student: Student, batches: gpt_corpus.Batches, count: int) -> float:
    """The mean loss of the first `count` batches held out; ends a run whose loss is no number.

    With gradients on, though none is computed: without, torch.compile would make a second program of the same forward.
    """
    losses = [student.loss(*batches.at(index)).detach() for index in range(count)]
    loss = float(torch.stack(losses).mean())
    if not math.isfinite(loss):
        raise RuntimeError(f"the evaluation loss is {loss}: this run has diverged")
    return loss


# --- Step times ------------------------------------------------------------------------------------------------


def time_steps(modes: Sequence[str], config: Config, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a whole step (forward, backward, clipping, AdamW), the modes interleaved in one process."""
    students, compiling = {}, {}
    for mode in modes:  # one after the other: torchao, last, patches Inductor when it converts
        students[mode] = Student(mode, config, device)
        compiling[mode] = students[mode].compile()
    errors = check(students)
    batches = random_batches(config, device)
    seconds: dict[str, list[float]] = {mode: [] for mode in students}
    for index in range(ROUNDS + 1):
        for mode, student in students.items():
            synchronize(device)
            began = time.perf_counter()
            for step in range(ROUND_STEPS):
                student.step(step, *batches.at(step))
            synchronize(device)
            if index:  # the first round warms up
                seconds[mode].append((time.perf_counter() - began) / ROUND_STEPS)
    rows = []
    base = statistics.median(seconds[modes[0]])
    for mode, student in students.items():
        low, median, high = statistics.quantiles(seconds[mode], n=4)
        row = {"mode": mode, "converted": len(student.converted), "milliseconds": 1e3 * median}
        row |= {"quartiles": [1e3 * low, 1e3 * high], "ratio": median / base, "compile_seconds": compiling[mode]}
        rows.append(row | {"gradient_error": errors.get(mode)})
        print(f"{mode:18} {1e3 * median:7.1f} ms  {median / base:.3f} of {modes[0]}", flush=True)
    facts = {"machine": record.facts(), "settings": settings(config), "rounds": ROUNDS, "round_steps": ROUND_STEPS}
    return {**facts, "base": modes[0], "graph_breaks": graph_breaks(), "steps": rows}


# --- The result ------------------------------------------------------------------------------------------------


def merge(folder: Path) -> Path:
    """Combine the run files below `folder`, and steps.json where it is there, to results/gpt_parity.json."""
    files = {path: json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))}
    runs = [content for content in files.values() if "seed" in content]
    shared = check_same(runs)
    final = {(run["mode"], run["seed"]): run["final"] for run in runs}
    bf16 = [loss for (mode, _), loss in final.items() if mode == "bf16"]
    modes = sorted({mode for mode, seed in final if ("bf16", seed) in final} - {"bf16"})
    result = {
        **shared,
        "runs": [{key: value for key, value in run.items() if key not in shared} for run in runs],
        "gaps": {mode: gaps(final, mode) for mode in modes},
        "bf16_spread": (max(bf16) - min(bf16)) / statistics.mean(bf16),
        "bf16_deviation": statistics.stdev(bf16) / statistics.mean(bf16) if len(bf16) > 1 else None,
        "step_times": next((content for path, content in files.items() if path.name == "steps.json"), None),
    }
    path = record.RESULTS / "gpt_parity.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return path


def check_same(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all runs must have in common: machine, settings, corpus, and per seed the weights they start from."""
    if not any(run["mode"] == "bf16" for run in runs):
        raise ValueError("the gaps are to BF16, and there is no file of a bf16 run: train bf16 on the same seeds")
    first, names = runs[0], [(run["mode"], run["seed"]) for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"a run stands in two files: {sorted(names)}")
    starts: dict[int, float] = {}
    for run, name in zip(runs, names, strict=True):
        start = starts.setdefault(run["seed"], run["initial_weights"])
        if not math.isclose(start, run["initial_weights"], rel_tol=1e-9):
            raise ValueError(f"{name} starts from other weights than the other runs of its seed")
        for what, key in (("machine", "gpu"), ("corpus", "fingerprint")):
            if run[what][key] != first[what][key]:
                raise ValueError(f"{name} has the {key} {run[what][key]}, {names[0]} has {first[what][key]}")
        if run["settings"] != first["settings"]:
            raise ValueError(f"{name} has other settings than {names[0]}: {run['settings']}, {first['settings']}")
    return {key: first[key] for key in ("machine", "settings", "corpus", "tokens", "epochs")}


def gaps(final: dict[tuple[str, int], float], mode: str) -> dict[str, Any]:
    """The relative gaps of a mode by seed, their mean and its 95 % interval (None with one seed)."""
    seeds = sorted(seed for each, seed in final if each == mode and ("bf16", seed) in final)
    by_seed = [final[mode, seed] / final["bf16", seed] - 1 for seed in seeds]
    mean, interval = statistics.fmean(by_seed), None
    if len(seeds) > 1:
        half = T_975[len(seeds) - 1] * statistics.stdev(by_seed) / math.sqrt(len(seeds))
        interval = [mean - half, mean + half]
    return {"seeds": seeds, "gaps": by_seed, "mean": mean, "interval": interval}


def settings(config: Config) -> dict[str, Any]:
    """What of `config` has a say here."""
    return {key: value for key, value in config.to_dict().items() if key in SETTINGS}


def graph_breaks() -> int:
    """How often torch.compile has split a program in this process: 0 is wanted."""
    return sum(torch._dynamo.utils.counters["graph_break"].values())


if __name__ == "__main__":
    main()
