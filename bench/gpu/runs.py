"""Does a model trained in FP8 end where BF16 ends, and what does a step cost? Whole training runs, by study:

    gpt, moe      a GPT of 124 million parameters, a mixture of experts of 90 million
    300m          a Llama of 309 million parameters on 101 million tokens, evaluated 16 times
    recipes       a small Llama with every recipe (`bench.gpu.recipes`), and `recipes-cpu`, one that a CPU trains
    attention     a Llama with attention in BF16 and in FP8

The text is source code and documentation on the machine itself (Python's standard library and the installed packages),
so nothing is downloaded. For each seed every mode starts from the same weights and sees the same batches. The gap of a
run is its final loss over that of BF16 with the same seed, less 1; the interval of the mean gap over seeds is
Student's.

The modes are those of `bench.gpu.loss`, and so is the training. A run's file is written at each of its evaluations, and
a run whose file is there is skipped, so a long measurement can be ended and begun again. With `--stop` runs end early,
on the schedule of all steps. Runs that did not end in time are compared at the last evaluation that all have reached.

    python -m bench.gpu.runs gpt --time bf16,rowwise,torchao --out FOLDER                      steps, in turns
    python -m bench.gpu.runs gpt --runs bf16:0,rowwise:0 --out FOLDER                          MODE:SEED
    python -m bench.gpu.runs gpt --merge FOLDER                                 FOLDER to bench/results

Several GPUs, or `--processes` on each, train modes with all their seeds, each mode in a process of its own.
"""

import hashlib
import json
import math
import statistics
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bench.gpu import harness
from bench.gpu.harness import DEVICE, Options, Result, Results, allocated, benchmark
from bench.gpu.loss.model import CONFIGS, padded
from bench.gpu.loss.training import LARGEST_FILE, SAMPLE, Learner, first, whole, write_run
from bench.gpu.variants import BASE, CONTROL, VARIANTS, implementations
from octavo.data import read_text
from octavo.evaluation.metrics import ratio
from octavo.models.tokenizer import Batches, BpeTokenizer, ByteTokenizer, Corpus, build_corpus
from octavo.scales import cast_once
from octavo.train.config import Config
from octavo.train.model import make_model

Run = tuple[str, int]  # its mode and its seed

SETTINGS = ("layers", "width", "heads", "context", "vocabulary", "batch", "accumulate", "steps", "learning_rate")
CURVE_STEPS = 10  # a point of the loss curve is the mean of so many steps
PYTHON = ("stdlib", f"{sysconfig.get_path('purelib')}/**/*.py")
SUFFIXES = ("py", "pyi", "rst", "md", "txt", "h", "hpp", "cuh", "js")
MORE = ("stdlib", *(f"{sysconfig.get_path('purelib')}/**/*.{suffix}" for suffix in SUFFIXES))
# The relative error of a weight gradient: below the first in BF16 that is compiled otherwise, between them in FP8.
GRADIENT_ERRORS = 0.02, 0.5


class Study(NamedTuple):
    """What a study trains, on which text, and how often it evaluates."""

    config: Config
    sources: Sequence[str]
    characters: int  # of the text, at the most
    evaluations: int  # in a run
    result: str  # the file of bench/results
    stop: int | None = None  # the step after which its runs end early


STUDIES = {
    "gpt": Study(CONFIGS["gpt"], PYTHON, 220_000_000, 1, "gpt_parity"),
    "moe": Study(CONFIGS["moe"], PYTHON, 220_000_000, 1, "moe_parity"),
    "300m": Study(CONFIGS["300m"], MORE, 400_000_000, 16, "pretrain_300m"),
    "recipes": Study(CONFIGS["recipes"], MORE, 45_000_000, 1, "recipes"),
    "recipes-cpu": Study(CONFIGS["recipes-cpu"], MORE, 3_000_000, 1, "recipes"),
    "attention": Study(CONFIGS["attention"], ("stdlib",), 220_000_000, 1, "gpu_attention_loss"),
}


def study_of(name: str) -> Study:
    """The study; a tiny one with `--quick`."""
    return tiny(STUDIES[name], width=256, context=128, mlp_width=256) if harness.QUICK else STUDIES[name]


def tiny(study: Study, **changes: Any) -> Study:
    """The study of a tiny model, on the text of this file."""
    sizes: Result = {"kv_heads": 2, "mlp_width": 128} if study.config.model == "llama" else {"mlp_width": 64}
    sizes |= {"layers": 1, "width": 64, "heads": 2, "context": 16, "tokenizer": "bytes", "vocabulary": 256, "batch": 4}
    sizes |= {"accumulate": 1, "steps": 4, "warmup": 1, "evaluate_batches": 2, "compile.blocks": False}
    return study._replace(config=study.config.change(**sizes | changes), sources=(__file__,))


# --- Data ------------------------------------------------------------------------------------------------------


def tokens_of(study: Study, out: Path) -> Corpus:
    """The tokens in `out`, which are made of the text on this machine if they are not there."""
    path, config = out / "tokens.npz", study.config
    if not path.exists():
        texts = [text for text in set(read_text(study.sources).texts) if len(text) <= LARGEST_FILE]
        texts.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
        texts = list(first(texts, study.characters))
        bpe = config.tokenizer == "bpe"
        tokenizer = BpeTokenizer.train(first(texts, SAMPLE), config.vocabulary) if bpe else ByteTokenizer()
        made = build_corpus(texts, tokenizer, config.context, config.validation_fraction)
        with whole(path) as part:
            np.savez(part, train=made.train, validation=made.validation, fingerprint=np.array(made.fingerprint))
    with np.load(path) as arrays:
        return Corpus(arrays["train"], arrays["validation"], str(arrays["fingerprint"]))


# --- Training --------------------------------------------------------------------------------------------------


def train_all(study: Study, plan: Sequence[Run], out: Path, processes: int = 1) -> None:
    """Train the runs that are not at their end in `out`. One worker alone is this process."""
    seeds: dict[str, list[int]] = {}
    stop = study.stop or study.config.steps
    for mode, seed in plan:
        if last_step(path_of(out, mode, seed)) < stop:
            seeds.setdefault(mode, []).append(seed)
    tokens_of(study, out)  # made once, before the workers read them
    gpus = max(torch.cuda.device_count(), 1)
    if gpus * processes == 1:
        for mode, each in seeds.items():
            train_mode(study, mode, each, out)
        return
    calls = [partial(train_mode, study, mode, each, out, i % gpus) for i, (mode, each) in enumerate(seeds.items())]
    harness.in_processes(gpus * processes, calls)  # a mode that does not run has no row in the table


def train_mode(study: Study, mode: str, seeds: Sequence[int], out: Path, gpu: int = 0) -> None:
    """Train the runs of one mode in this process, on that GPU."""
    if DEVICE == "cuda":
        torch.cuda.set_device(gpu)
    torch._dynamo.reset()  # frees the model of the mode before
    allocated()
    config, data = study.config, tokens_of(study, out)
    learner = learner_of(mode, config)
    corpus = {"fingerprint": data.fingerprint, "train_tokens": len(data.train)}
    facts: Result = {"settings": settings(config), "corpus": corpus}
    if mode in VARIANTS:
        facts["gemms"] = implementations(mode, learner.device)
    with cast_once(learner.model):
        learner.warm_up()
        for seed in seeds:
            begin(learner, seed)
            for progress in train(learner, study, data, seed):
                write_run(path_of(out, mode, seed), learner, {"seed": seed} | facts | progress)


def learner_of(mode: str, config: Config) -> Learner:
    return Learner(mode, config, torch.device(DEVICE), normed=False)


def begin(learner: Learner, seed: int) -> None:
    """The weights of a seed, and no moments. The control begins with rounded weights."""
    learner.restart({name: torch.zeros_like(tensor) for name, tensor in learner.state().items()})
    torch.manual_seed(seed)
    weights = make_model(learner.config, padded(learner.config), Path()).state_dict()
    if learner.mode == CONTROL:
        weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    learner.model.load_state_dict(weights)  # after which `cast_once` casts them again


def batch_at(batches: Batches, index: int) -> Tensor:
    """The sequences [batch, context + 1] of a batch, on the device."""
    inputs, targets = batches.at(index)
    return torch.cat((inputs, targets[:, -1:]), 1).to(DEVICE)


def training_batches(data: Corpus, config: Config, seed: int) -> Batches:
    return Batches(data.train, config.context, config.batch * config.accumulate, seed)


def train(learner: Learner, study: Study, data: Corpus, seed: int) -> Iterator[Result]:
    """Train; gives the run so far at each evaluation. One that diverges ends there."""
    config, cuda = study.config, DEVICE == "cuda"
    stop = study.stop or config.steps
    every = max(config.steps // study.evaluations, 1)
    tokens = config.batch * config.accumulate * config.context
    training = training_batches(data, config, seed)
    validation = Batches(data.validation, config.context, config.batch * config.evaluate_batches, None)
    held_out = batch_at(validation, 0)[: validation.sequences]
    losses: list[Tensor] = []
    evaluations: list[Result] = []
    seconds, finite = 0.0, True
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    while len(losses) < stop and finite:
        began, first = time.perf_counter(), len(losses)
        for index in range(first, min(first + every, stop)):
            losses.append(learner.step(index, batch_at(training, index)))
        if cuda:
            torch.cuda.synchronize()
        seconds += time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        (by_batch,) = learner.evaluate(held_out).values()
        loss, curve = statistics.fmean(by_batch), means(torch.stack(losses).tolist())
        finite = all(map(math.isfinite, (loss, *curve)))
        evaluations.append({"step": len(losses), "seconds": seconds, "loss": loss if finite else None})
        yield {
            "whole": len(losses) == config.steps,
            "tokens": tokens * len(losses),
            "epochs": tokens * len(losses) / (training.sequences * config.context),
            "seconds": seconds,
            "tokens_per_second": tokens * len(losses) / seconds,
            "peak_bytes": peak,
            "evaluations": evaluations,
            "curve": curve if finite else None,
            "final": evaluations[-1]["loss"],
        }


def means(losses: list[float]) -> list[float]:
    """The means over CURVE_STEPS training losses each."""
    return [statistics.fmean(losses[i : i + CURVE_STEPS]) for i in range(0, len(losses), CURVE_STEPS)]


def path_of(out: Path, mode: str, seed: int) -> Path:
    return out / f"{mode}-{seed}.json"


def last_step(path: Path) -> int:
    """The step of the last evaluation in a run's file; 0 if there is no file. A run that diverged is at its end."""
    run: Result = json.loads(path.read_text()) if path.exists() else {"final": 0.0, "evaluations": [{"step": 0}]}
    return int(run["settings"]["steps"] if run["final"] is None else run["evaluations"][-1]["step"])


def settings(config: Config) -> Result:
    mixture = {"mlp_width": config.mlp_width, "experts": asdict(config.experts)} if config.model == "mixture" else {}
    return {name: getattr(config, name) for name in SETTINGS} | mixture


# --- Step times ------------------------------------------------------------------------------------------------


def time_steps(modes: Sequence[str], config: Config) -> Result:
    """Milliseconds of a whole optimizer step, the modes taking turns in one process."""
    learners = {mode: learner_of(mode, config) for mode in modes}  # torchao last: it patches Inductor
    rows_of_step = config.batch * config.accumulate
    tokens = torch.randint(config.vocabulary, (rows_of_step, config.context + 1), device=DEVICE)
    errors = gradient_errors(learners, tokens[: config.batch])
    with ExitStack() as stack:
        for learner in learners.values():
            stack.enter_context(cast_once(learner.model))
        steps = {mode: partial(learner.step, 0, tokens) for mode, learner in learners.items()}
        times = harness.interleaved(steps, rounds=12, repeat=3)
    base = harness.summary(times[modes[0]])["median"]
    rows = []
    for mode, learner in learners.items():
        found = harness.summary(times[mode])
        facts: Result = {"milliseconds": found["median"], "ratio": found["median"] / base}
        facts |= {"quartiles": [found["low"], found["high"]], "gradient_error": errors.get(mode)}
        rows.append({"mode": mode, "converted": learner.converted, **facts})
        harness.show(rows[-1])
    return {"settings": settings(config), "base": modes[0], "steps": rows}


def gradient_errors(learners: dict[str, Learner], tokens: Tensor) -> dict[str, float]:
    """The relative error of each mode's worst weight gradient, against the first mode's on the same weights and batch.

    An error outside GRADIENT_ERRORS, as of a wrong gradient or of a mode that does not run in FP8, is a RuntimeError.
    """
    expected: dict[str, Tensor] = {}
    errors = {}
    for mode, learner in learners.items():
        begin(learner, 0)
        actual = learner.gradients(tokens)
        if not expected:
            expected = actual
            continue
        gaps = {name: float((actual[name] - exact).norm() / exact.norm()) for name, exact in expected.items()}
        worst = max(gaps, key=lambda name: gaps[name] if math.isfinite(gaps[name]) else math.inf)
        errors[mode] = gaps[worst]
        least, most = GRADIENT_ERRORS if learner.converted else (0.0, GRADIENT_ERRORS[0])
        if not least <= gaps[worst] <= most:
            raise RuntimeError(f"{mode}: the gradient of {worst} must be off by {least} to {most}, is by {gaps[worst]}")
    return errors


# --- The result ------------------------------------------------------------------------------------------------


def merge(folder: Path) -> Result:
    """The runs below `folder`, compared at the last evaluation that all of them have reached, and steps.json.

    A run that diverged is in no mean.
    """
    files = {path: json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))}
    runs = [content for content in files.values() if "seed" in content]
    keys = [(run["mode"], run["seed"]) for run in runs]
    if not any(mode == BASE for mode, _ in keys) or len(set(keys)) < len(keys):
        raise ValueError(f"{folder} must hold each run once, those of {BASE} among them; it holds {sorted(keys)}")
    for run, key in product(runs, ("settings", "corpus")):
        if run[key] != runs[0][key]:
            raise ValueError(f"all runs must have the same {key}; {run['mode']}:{run['seed']} has {run[key]}")
    finite = [run for run in runs if run["final"] is not None]
    last = min(len(run["evaluations"]) for run in finite) - 1
    compared = finite[0]["evaluations"][last]["step"]
    final = {(run["mode"], run["seed"]): run["evaluations"][last]["loss"] for run in finite}
    bf16 = [loss for (mode, _), loss in final.items() if mode == BASE]
    target = max(final.values())
    for run in finite:
        run["compared_loss"] = final[run["mode"], run["seed"]]
        run["seconds_to_target"] = seconds_to(target, run["evaluations"])
    tokens = compared * runs[0]["tokens"] // runs[0]["evaluations"][-1]["step"]
    paired = sorted({mode for mode, seed in final if (BASE, seed) in final} - {BASE})
    shared = ("machine", "settings", "corpus")
    losses: dict[str, dict[str, float]] = {}
    for (mode, seed), loss in final.items():
        losses.setdefault(mode, {})[str(seed)] = loss
    return {
        **{key: runs[0][key] for key in shared},
        "compared_at_step": compared,
        "compared_tokens": tokens,
        "tokens": tokens,
        "epochs": runs[0]["epochs"] * tokens / runs[0]["tokens"],
        "target": target,
        "losses": losses,
        "gaps": {mode: gaps(final, mode) for mode in paired},
        "bf16_spread": (max(bf16) - min(bf16)) / statistics.mean(bf16) if len(bf16) > 1 else None,
        "runs": [{key: value for key, value in run.items() if key not in shared} for run in runs],
        "step_times": next((content for path, content in files.items() if path.name == "steps.json"), None),
    }


def early(result: Result) -> str:
    """The end of the name of a result whose runs end early: they have another file than whole runs."""
    return f"_{result['compared_at_step']}" if result["compared_at_step"] < result["settings"]["steps"] else ""


def gaps(final: dict[Run, float], mode: str) -> Result:
    """The relative gaps of a mode by seed, their mean and its 95 % interval (None with one seed)."""
    seeds = sorted(seed for each, seed in final if each == mode and (BASE, seed) in final)
    by_seed = [final[mode, seed] / final[BASE, seed] - 1 for seed in seeds]
    mean = ratio(by_seed, [1.0] * len(by_seed))
    interval = None if mean.low is None else [mean.low, mean.high]
    return {"seeds": seeds, "gaps": by_seed, "mean": mean.value, "interval": interval}


def seconds_to(target: float, evaluations: list[dict[str, float]]) -> float | None:
    """The training time at which the loss first reaches `target`, on straight lines between evaluations."""
    reached = next((i for i, after in enumerate(evaluations) if after["loss"] <= target), None)
    if reached is None:
        return None
    around = evaluations[max(reached - 1, 0) : reached + 1][::-1]  # the losses rise
    return float(np.interp(target, [each["loss"] for each in around], [each["seconds"] for each in around]))


@benchmark(study=STUDIES, runs="", processes=1, out=Path("runs/bench"), time="", stop=int, merge=Path)
def main(options: Options) -> Results:
    study = study_of(options.study)._replace(stop=options.stop)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.time:
        harness.write_result("steps", time_steps(options.time.split(","), study.config), options.out)
    if options.runs:
        plan = [(mode, int(seed)) for mode, _, seed in (run.rpartition(":") for run in options.runs.split(","))]
        train_all(study, plan, options.out, options.processes)
    if options.merge:
        found = merge(options.merge)
        yield study.result + early(found), {"model": options.study, **found}
