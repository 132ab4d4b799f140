"""One table of all recipes: the gap of the loss to BF16's, the SQNR of real operands, speed and peak memory.

The runs are those of the study `recipes` of `bench.gpu.runs`. Each part writes files to --out, and a run whose file is
there is skipped, so that the table can be made in several calls. Without --only all parts run.

    python -m bench.gpu.recipes                               all GPUs of the machine
    python -m bench.gpu.recipes --only losses --out FOLDER    a part
    python -m bench.gpu.recipes --merge FOLDER                FOLDER to bench/results/recipes.json
    python -m bench.gpu.recipes --cpu                         a small model, without speed and memory

*SQNR*: a Llama is trained in BF16. Two passes on further batches give the x, w and dy of each linear layer. Each layer
then runs alone with each recipe, on the first pass and on the second: delayed scaling takes its scales from the first,
and the second is measured, against the same products in float64. The SQNR of a whole product hides its small rows and
columns, so that of the worst of them stands beside it.

*Speed* and *peak memory*: blocks of Llama-3-8B's shape, BF16 weights, forward and backward. The blocks are plain
modules, so that all recipes run the same code around their GEMMs, and each is compiled by itself. Recipes that do the
same work (delayed scaling with other margins) are measured once. A recipe with an emulated GEMM is not measured on a
GPU. A step includes the cast of the weights, and the update of delayed scaling.
"""

import copy
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import octavo
from bench.gpu import harness, llama, runs
from bench.gpu.harness import DEVICE, Options, Result, Results, benchmark, show, sized
from bench.gpu.loss.training import Learner
from bench.gpu.runs import Study, batch_at, begin, training_batches
from bench.gpu.stack import Mode, Runner
from bench.gpu.variants import BASE, CONTROL, VARIANTS, implementations, recipe_of
from octavo.comparison import Call, seen_calls
from octavo.models.llama import LlamaConfig
from octavo.models.tokenizer import Corpus

PARTS = ("losses", "errors", "speed")
CONFIG = replace(llama.CONFIG, layers=2)  # of the speed
Pass = dict[str, tuple[Tensor, Tensor]]  # the x [T, K] and the dy [T, N] of each layer


# --- The table -------------------------------------------------------------------------------------------------


def merge(folder: Path) -> Result:
    """The files below `folder` as one result: the gaps of each recipe, and errors.json and speed.json where they are.

    A run whose loss is not finite is counted in "diverged", and is in no mean. If `folder` has no runs, its errors and
    speeds replace those of bench/results/recipes.json.
    """
    files = {path: json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))}
    parts = {path.stem: content for path, content in files.items() if path.stem in ("errors", "speed")}
    trained = [content for content in files.values() if "seed" in content]
    if parts and not trained:
        return {**harness.result_before("recipes"), **parts}
    found = runs.merge(folder)
    bf16 = list(found["losses"][BASE].values())
    own = {name: [run for run in trained if run["mode"] == name] for name in VARIANTS}
    recipes = {name: {"gemms": each[0]["gemms"], "gap": found["gaps"].get(name)} for name, each in own.items() if each}
    for name, row in recipes.items():
        row |= {"losses": (ended := found["losses"].get(name, {})), "diverged": len(own[name]) - len(ended)}
    return {
        **{key: found[key] for key in ("machine", "settings", "corpus", "tokens")},
        "bf16": {"losses": bf16, "spread": statistics.stdev(bf16) / statistics.mean(bf16) if len(bf16) > 1 else None},
        "recipes": recipes,
        **{name: parts.get(name) for name in ("errors", "speed")},
    }


# --- Errors ----------------------------------------------------------------------------------------------------


def errors(names: Sequence[str], study: Study, data: Corpus) -> Result:
    """For each recipe and each of y, dx and dw the SQNR in dB: of the median layer, of the worst, and of the worst row
    or column of any layer."""
    config = study.config
    learner = runs.learner_of(BASE, config.change(**{"compile.blocks": False}))
    batches = training_batches(data, config, 0)
    begin(learner, 0)
    for index in range(config.steps):
        learner.step(index, batch_at(batches, index))
    layers = linears(learner.model)
    passes = [operands(learner, layers, batch_at(batches, config.steps + i)) for i in range(2)]
    found = {}
    for name in names:
        if name == CONTROL:
            continue
        rows = {layer: sqnrs(linear, [each[layer] for each in passes], name) for layer, linear in layers.items()}
        found[name] = {gemm: extremes({layer: row[gemm] for layer, row in rows.items()}) for gemm in ("y", "dx", "dw")}
        show(name, found[name])
    model = {"blocks": config.layers, "width": config.width, "layers": len(layers)}
    return {**model, "steps": config.steps, "tokens": config.batch * config.context, "recipes": found}


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers but the head."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}


def operands(learner: Learner, layers: dict[str, nn.Linear], sequences: Tensor) -> Pass:
    """x and dy of each layer in a forward and backward pass on a training batch."""
    found: dict[tuple[str, str], Tensor] = {}

    def see(call: Call, tensor: str, value: Tensor) -> None:
        if tensor in ("x", "dy"):
            found[call.name, tensor] = value.detach().flatten(0, -2)

    with seen_calls(dict(layers), see):
        torch.autograd.backward(learner.forward(learner.model.train(), sequences))
    learner.model.zero_grad()
    return {name: (found[name, "x"], found[name, "dy"]) for name in layers}


def sqnrs(linear: nn.Linear, passes: Sequence[tuple[Tensor, Tensor]], name: str) -> dict[str, tuple[float, float]]:
    """The SQNR of y, dx and dw of a layer with a recipe, whole and of the worst channel, on the last of the passes."""
    layer = nn.Linear(linear.in_features, linear.out_features, bias=False, device=linear.weight.device)
    layer.weight = nn.Parameter(linear.weight.detach().clone())
    model = nn.Sequential(layer)
    octavo.convert(model, recipe_of(name))
    found: dict[str, Tensor] = {}
    for x, dy in passes:
        x_leaf = copy.copy(x).requires_grad_()
        layer.weight.grad = None
        with torch.autocast(x.device.type, torch.bfloat16):
            y = model(x_leaf)
        y.backward(dy)
        octavo.scales.update_scales(model)
        assert x_leaf.grad is not None
        assert layer.weight.grad is not None
        found = {"y": y.detach(), "dx": x_leaf.grad, "dw": layer.weight.grad}
    x64, dy64, w64 = (t.double() for t in (*passes[-1], layer.weight.detach()))
    exact = {"y": x64 @ w64.t(), "dx": dy64 @ w64, "dw": dy64.t() @ x64}
    return {gemm: (harness.decibels(e, found[gemm]), worst_channel(e, found[gemm])) for gemm, e in exact.items()}


def worst_channel(exact: Tensor, actual: Tensor) -> float:
    """The least SQNR, in dB, of a row or a column of `actual` that is not all zero in `exact` (float64, [M, N])."""
    signal, noise = exact.square(), (actual.double() - exact).square()
    ratios = (noise.sum(dim) / signal.sum(dim) for dim in (0, 1))  # 0 / 0 for a row of zeros, which nothing changed
    return -10 * math.log10(max(float(ratio[ratio.isfinite()].max()) for ratio in ratios))


def extremes(by_layer: dict[str, tuple[float, float]]) -> Result:
    whole, channels = zip(*by_layer.values(), strict=True)
    return {"median": statistics.median(whole), "worst": min(whole), "worst_channel": min(channels)}


# --- Speed -----------------------------------------------------------------------------------------------------


def speeds(names: Sequence[str], config: LlamaConfig, tokens: int, rounds: int = 6) -> Result:
    """Milliseconds, and peak bytes, of a step with each recipe; of BF16 too. One that does not run has no row."""
    device = torch.device(DEVICE)
    names = list(dict.fromkeys([BASE, *names]))
    same = equal_work(names)
    distinct = dict.fromkeys(same.values())
    on_gpu = [name for name in distinct if "emulated" not in implementations(name, device).values()]
    chosen = on_gpu if DEVICE == "cuda" else distinct
    modes: dict[str, Mode] = {name: (llama.Plain, octavo.convert, recipe_of(name), "blocks") for name in chosen}
    runners, peaks = harness.built({name: partial(Runner, mode, config, tokens) for name, mode in modes.items()})
    rows: dict[str, Result] = {BASE: {}}
    rows |= {name: {"sqnr": found} for name, found in harness.checked(BASE, runners).items()}
    steps = {name: runner.step for name, runner in runners.items()}
    times = harness.interleaved(steps, rounds=rounds, repeat=4, warmup=1)
    for name, row in harness.rows_of(times, BASE).items():
        rows[name] |= row | {"peak_bytes": peaks[name]}
        show(name, rows[name])
    by_name = {name: rows[same[name]] | {"measured_as": same[name]} for name in names if same.get(name) in rows}
    return {"layers": config.layers, "width": config.width, "tokens": tokens, "recipes": by_name}


def equal_work(names: Sequence[str]) -> dict[str, str]:
    """The first recipe of those that do the same work, for each of `names` but the control. Margins of delayed scaling
    change the scales and not the work."""
    recipes = {name: replace(recipe_of(name), name="").to_json() for name in names if name != CONTROL}
    first: dict[str, str] = {}
    return {name: first.setdefault(re.sub(r'"margin": [^,}]*', "", text), name) for name, text in recipes.items()}


@benchmark(cpu=False, recipes=",".join(VARIANTS), out=Path("runs/recipes"), only=PARTS, merge=Path)
def main(options: Options) -> Results:
    if options.merge:
        yield "recipes", merge(options.merge)
        return
    names = options.recipes.split(",")
    if unknown := [name for name in names if name not in VARIANTS]:
        raise SystemExit(f"unknown recipe {unknown[0]!r}: choose some of {', '.join(VARIANTS)}")
    if options.cpu == torch.cuda.is_available():
        raise SystemExit("a machine without a GPU needs --cpu; one with a GPU takes it with CUDA_VISIBLE_DEVICES= only")
    study = runs.study_of("recipes-cpu" if options.cpu else "recipes")
    options.out.mkdir(parents=True, exist_ok=True)
    parts = [options.only] if options.only else [part for part in PARTS if part != "speed" or not options.cpu]
    if "losses" in parts:
        names.sort(key=lambda name: "emulated" not in implementations(name, torch.device(DEVICE)).values())  # longest
        plan = [(name, seed) for name in names for seed in range(sized(5, 1))]
        runs.train_all(study, plan, options.out, processes=1 if options.cpu else sized(5, 1))
    if "errors" in parts:
        harness.write_result("errors", errors(names, study, runs.tokens_of(study, options.out)), options.out)
    if "speed" in parts:
        harness.write_result("speed", speeds(names, CONFIG, llama.TOKENS), options.out)
    if not options.only:
        yield "recipes", merge(options.out)
