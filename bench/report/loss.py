"""The page of the loss study: what branches of one trunk say, from bench/results/gpu_loss_* and cpu_loss_*."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.gpu.loss.model import WITHOUT
from bench.gpu.loss.training import SHARE
from bench.report.filler import MISSING, Fields, Result, Rows

NAMES = {
    "bf16": "BF16",
    "twin": "BF16, a twin",
    "rowwise_y_only": "`rowwise`, y alone in FP8",
    "rowwise_dx_only": "`rowwise`, dx alone in FP8",
    "rowwise_dw_only": "`rowwise`, dw alone in FP8",
    "rowwise_exact": "`rowwise` without fast accumulation",
    "rowwise + FP8 attention": "`rowwise`, attention in FP8",
    "rowwise + FP8 head": "`rowwise`, head in FP8",
    "tensorwise_e4m3": "`tensorwise`, gradients in E4M3",
    "delayed_e5m2_margin_1": "`delayed`, gradients in E5M2, margin 1",
    "torchao_rowwise": "torchao `rowwise`",
    "torchao_tensorwise": "torchao `tensorwise`",
}
MODELS = {"gpt2": " with GELU", "mixture": " of experts"}  # others than a Llama
CONCLUDED = {"rowwise", "rowwise_dx_only", "rowwise + FP8 head", "groupwise", "tensorwise_e4m3", "x of all"}
FEW = 4  # fewer data orders than these say too little about their own deviation


def studies(results: Mapping[str, Result]) -> list[Fields]:
    """The results of the study: the main share of a run first, and the largest model first."""
    found = [
        Fields({**result, "name": name, "model": label(result)})
        for name, result in results.items()
        if name.startswith(("gpu_loss_", "cpu_loss_"))
    ]
    return sorted(found, key=lambda study: (study.branch.share != SHARE, -study.parameters, -study.branch.share))


def main(results: Mapping[str, Result]) -> Fields:
    """The study that the page's conclusions rest on: the first that has the recipes they name."""
    return next(study for study in studies(results) if study.modes.keys() >= CONCLUDED)


def named(mode: str) -> str:
    """A mode in the words of a table."""
    base, _, left = mode.partition(WITHOUT)
    return NAMES.get(mode) or (f"{named(base)}, `{left}` in BF16" if left else f"`{mode}`")


def rise(study: Fields, mode: str) -> float | None:
    """By how much a training loss of the mode exceeds that of BF16 on the same batch, at the most; None for BF16."""
    losses = {(run.mode, run.order): run.losses for run in study.runs.branches}
    pairs = [zip(losses[mode, order], losses["bf16", order], strict=True) for order in study.modes[mode].orders]
    return None if mode == "bf16" else max(a / b - 1 for pair in pairs for a, b in pair)


def frozen(results: Mapping[str, Result]) -> Rows:
    """A row a study and a recipe: its forward pass on weights of the trunk, and of the BF16 branches at their end."""
    for study in studies(results):
        for mode, files in study.frozen.items():
            ends = [each.gap for name, each in files.items() if name != "trunk"]
            if mode != "bf16":
                end = sum(ends) / len(ends) if ends else None
                yield {**files, "model": study.model, "mode": named(mode), "end": end}


def gradients(results: Mapping[str, Result]) -> list[Fields]:
    """A row a study and a recipe: the bias and the noise of its gradients of weights, as shares of the gradients."""
    return [
        Fields({**row, "model": study.model, "mode": named(mode)})
        for study in studies(results)
        for mode, row in study.get("gradients", {}).items()
    ]


def label(study: Any) -> str:
    """The model, and what is not as in the main study: the step of the branches and their rate."""
    rate = study.branch.get("rate", 1.0)
    at = "" if study.branch.share == SHARE else f", branches at {study.branch.share:.0%}"
    faster = "" if rate == 1 else f", {rate:g}x of the rate"
    kind = MODELS.get(study.settings.get("model", "llama"), "")
    return f"{study.parameters / 1e6:.1f}M{kind} on {'one GPU' if study.machine.gpu else 'a CPU'}{at}{faster}"


def shares(results: Mapping[str, Result]) -> str:
    """The shares of a run after which branches leave, as "60%, 30% or 10%"."""
    found = {study.branch.share for study in studies(results)}
    *others, last = (f"{share:.0%}" for share in sorted(found, reverse=True))
    return f"{', '.join(others)} or {last}" if others else last


def interval(gap: Any) -> str:
    """The gap with half of its 95 % interval, the pooled one of a recipe with fewer than FEW orders."""
    if len(gap.by_order) < FEW and "half_pooled" in gap and not math.isclose(gap.half_pooled, gap.half or 0):
        return f"{gap.gap:+.3%} {percent(gap.half_pooled)} (pooled)"
    return f"{gap.gap:+.3%} {'(one order)' if gap.half is None else percent(gap.half)}"


def percent(half: float | None) -> str:
    return MISSING if half is None else f"± {half:.3%}"


CHANCE = 0.001  # the twin of a study that decides stays within this, relative


def deciding(results: Mapping[str, Result], *modes: str) -> Fields:
    """The study with the earliest branch that has FEW orders of `modes` and of a twin inside CHANCE."""
    found = [study for study in studies(results) if _decides(study, ("twin", *modes))]
    return min(found, key=lambda study: study.branch.share)


def _decides(study: Fields, modes: Sequence[str]) -> bool:
    rows = [study.modes[mode].bf16 for mode in modes if mode in study.modes and len(study.modes[mode].orders) >= FEW]
    return len(rows) == len(modes) and study.branch.get("rate", 1.0) == 1 and abs(rows[0].gap) + rows[0].half < CHANCE


def cost(results: Mapping[str, Result], mode: str, form: str = "bf16", name: str = "") -> str:
    """The gap of a mode in the result `name`, or in the main study."""
    study: Any = results[name] if name else main(results)
    return interval(study.modes[mode][form])


def checked(results: Mapping[str, Result]) -> str:
    """A sentence on the shorter runs that checked the learning rate of a study."""
    study = max(studies(results), key=lambda study: len(study.rates))
    runs = (f"{each.loss:.4f} ({each.rate}x, {each.steps:,} steps)" for each in study.rates)
    return f"Shorter runs of BF16 at other learning rates, {study.model}: {', '.join(runs)}. Branches ran at 1.0x."
