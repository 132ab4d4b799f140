"""The runs of the study as one result: the gap of each mode to BF16, its interval, and what it is worth in tokens.

The loss of a run is the mean of its last three evaluations. A gap is relative to the loss of the BF16 branch of the
same data order, evaluated in BF16:

    bf16   the mode's weights in BF16: what training in FP8 costs
    fp8    the mode's weights in the mode's own forward pass: what training and serving in FP8 cost together;
           of BF16 and the twin, in the forward pass of `rowwise`: what serving in FP8 costs

Its interval is Student's, over the data orders. Two orders give a wide one, since they say little about their own
deviation. `half_pooled` is half of the interval with one deviation for all recipes: the root of the mean of their
variances, each weighed by its orders less one. The held-out text is the same for all orders; `text_half` is half of the
interval over the batches of that text, of the mean over the orders.

`steps` is the gap over the slope at the end of the BF16 branches. There the rate goes to zero and the loss falls
faster than it does in a longer run, so this is a lower bound. `tokens` rests on runs of other lengths: the share of
tokens by which a run must be longer to make up for the gap, if its loss falls with the logarithm of its length as the
loss of BF16 does from half of the length to the whole.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.gpu.loss.model import IN_BF16, MODES
from bench.gpu.loss.training import DISTURBANCE, LAST, Study, rows_of_step
from bench.gpu.runs import settings
from octavo.evaluation.metrics import ratio, student_quantile
from octavo.train.config import Config

FORMS = ("bf16", "fp8")
Run = dict[str, Any]  # what a file says
Key = tuple[str, int]  # a mode and a data order


def merge(folder: Path, study: Study) -> dict[str, Any]:
    """The files of `folder`; modes without a run of BF16 in the same order have no gap.

    Raises:
        ValueError: `folder` has no run of BF16.
    """
    config = study.config
    runs: dict[Key, Run] = {(run["mode"], run["order"]): run for run in read(folder, "branch-*.json")}
    if not any(mode == "bf16" for mode, _ in runs):
        raise ValueError(f"{folder} must have a branch of bf16 to compare with; it has {sorted(runs)}")
    rates = read(folder, "rate-*.json")
    trunk = read(folder, "trunk.json")[0]
    tokens, parameters = config.steps * rows_of_step(config) * config.context, trunk["parameters"]
    named = ("model", "mlp_width", "schedule", "decay", "warmup", "evaluate_batches")
    shape = {name: getattr(config, name) for name in named}
    branch = {"share": study.share, "rate": study.rate, "step": study.first}
    frozen = {run["mode"]: run for run in read(folder, "frozen-*.json")}
    curve = curve_of(runs, rates, config)
    names = dict.fromkeys((*MODES, *(mode for mode, _ in runs)))
    modes = {mode: row(mode, runs, curve) for mode in names if orders_of(mode, runs)}
    add_pooled([found for mode, found in modes.items() if mode not in IN_BF16])
    return {
        "machine": trunk["machine"],
        "settings": settings(config) | shape,
        "text": json.loads((folder / "text.json").read_text()),
        "parameters": parameters,
        "tokens": tokens,
        "tokens_per_parameter": tokens / parameters,
        "branch": branch | {"disturbance": DISTURBANCE, "evaluations": LAST},
        **curve,
        "modes": modes,
        "frozen": {mode: frozen_row(run, frozen["bf16"]) for mode, run in frozen.items()},
        "gradients": {run["mode"]: gradient_row(run) for run in read(folder, "gradients-*.json")},
        "runs": {"trunk": trunk, "rates": rates, "branches": list(runs.values()), "frozen": list(frozen.values())},
    }


def read(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def orders_of(mode: str, runs: dict[Key, Any]) -> list[int]:
    """The data orders of a mode of which BF16 has a run."""
    return sorted(order for each, order in runs if each == mode and ("bf16", order) in runs)


def by_batch(run: dict[str, Any], form: str) -> list[float]:
    """The losses of a run by batch of held-out text, means over its evaluations."""
    return [fmean(losses) for losses in zip(*(each[form] for each in run["evaluations"]), strict=True)]


# --- The curve -------------------------------------------------------------------------------------------------


def curve_of(runs: dict[Key, dict[str, Any]], rates: Sequence[dict[str, Any]], config: Config) -> dict[str, Any]:
    """The loss of BF16 at the end and its slope, by step and by the length of a run.

    The slope is relative, a step. `per_doubling` is the loss in nats that a run of half the length has more; None
    without that run.
    """
    base = [run for (mode, _), run in runs.items() if mode == "bf16"]
    loss = fmean(fmean(by_batch(run, "bf16")) for run in base)
    ends = [(run["evaluations"][0], run["evaluations"][-1]) for run in base]
    falls = [(fmean(a["bf16"]) - fmean(b["bf16"])) / (b["step"] - a["step"]) for a, b in ends]
    checked = [{"steps": r["steps"], "rate": r["rate"], "loss": fmean(r["evaluation"]["bf16"])} for r in rates]
    half = [run["loss"] for run in checked if run["steps"] == config.steps // 2]
    doubling = half[0] - loss if half else None
    return {"loss": loss, "slope": fmean(falls) / loss, "per_doubling": doubling, "rates": checked}


# --- Gaps ------------------------------------------------------------------------------------------------------


def row(mode: str, runs: dict[Key, Run], curve: Run) -> dict[str, Any]:
    """A mode: its data orders, its layers in FP8, and its gap in both forms. BF16 in BF16 is what all compare with."""
    orders = orders_of(mode, runs)
    pairs = [(runs[mode, order], runs["bf16", order]) for order in orders]
    forms = FORMS[1:] if mode == "bf16" else FORMS
    gaps = {form: gap(pairs, form, "bf16", curve) for form in forms}
    if mode == "rowwise":
        gaps["fp8_to_served_bf16"] = gap(pairs, "fp8", "fp8", curve)
    finite = all(math.isfinite(loss) for run, _ in pairs for loss in run["losses"])
    return {"orders": orders, "converted": pairs[0][0]["converted"], "finite": finite, **gaps}


def gap(pairs: Sequence[tuple[Run, Run]], form: str, base_form: str, curve: Run) -> dict[str, Any]:
    """The relative gap of the first runs, evaluated in `form`, to the second, evaluated in `base_form`."""
    found = [(by_batch(run, form), by_batch(base, base_form)) for run, base in pairs]
    by_order = [fmean(a) / fmean(b) - 1 for a, b in found]
    mean = ratio(by_order, [1.0] * len(by_order))
    batches = len(found[0][0])
    differences = [fmean(a[k] - b[k] for a, b in found) for k in range(batches)]
    over_text = ratio(differences, [fmean(b[k] for _, b in found) for k in range(batches)])
    doubling = curve["per_doubling"]
    return {
        "gap": mean.value,
        "half": None if mean.high is None else mean.high - mean.value,
        "by_order": by_order,
        "text_half": None if over_text.high is None else over_text.high - over_text.value,
        "steps": mean.value / curve["slope"],
        "tokens": None if not doubling else 2 ** (mean.value * curve["loss"] / doubling) - 1,
    }


def add_pooled(rows: Sequence[dict[str, Any]]) -> None:
    """Give each gap of the rows of recipes its `half_pooled`, if a recipe has two orders or more."""
    for form in FORMS:
        gaps = [row[form]["by_order"] for row in rows]
        freedom = sum(len(by_order) - 1 for by_order in gaps)
        if freedom:
            squares = math.fsum((each - fmean(found)) ** 2 for found in gaps for each in found)
            half = student_quantile(freedom) * math.sqrt(squares / freedom)  # of one order
            for row, found in zip(rows, gaps, strict=True):
                row[form]["half_pooled"] = half / math.sqrt(len(found))


def frozen_row(run: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """The gap of one forward pass to BF16 on the same weights, which were trained in BF16, by file of weights."""
    rows = {}
    for name in sorted(run["losses"].keys() & base["losses"].keys()):
        losses, bases = run["losses"][name], base["losses"][name]
        found = ratio([a - b for a, b in zip(losses, bases, strict=True)], bases)
        rows[name] = {"gap": found.value, "text_half": None if found.high is None else found.high - found.value}
    return rows


def gradient_row(run: dict[str, Any]) -> dict[str, Any]:
    """The bias and the noise of dw, relative and squared: the median over the weights, and the worst."""
    weights = run["weights"].values()
    rows = {kind: [each[kind] for each in weights] for kind in ("bias", "noise")}
    return {kind: {"median": median(found), "worst": max(found)} for kind, found in rows.items()}
