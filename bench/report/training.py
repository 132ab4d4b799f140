"""The figures of docs/pretraining.md and docs/vision.md: whole models trained in BF16 and in FP8."""

import statistics

from bench.report.filler import Fields, Result, Rows
from octavo.evaluation.metrics import ratio

BASE = "bf16"
# The figures of each task: the key in the result, the heading, and the form of a value.
FIGURES = {
    "classifier": (("accuracy", "accuracy", ".1%"), ("loss", "loss", ".4f")),
    "diffusion": (("frechet", "Fréchet distance", ".4f"), ("loss", "loss", ".4f"), ("recognized", "recognized", ".1%")),
}


def models(results: dict[str, Result]) -> list[Result]:
    """The result of each model, the smallest first, with its label."""
    found = [result for name, result in results.items() if name.startswith("pretrain_")]
    found.sort(key=lambda result: result["settings"]["layers"] * result["settings"]["width"] ** 2)
    return [Fields({**result, "label": label(result)}) for result in found]


def label(result: Result) -> str:
    """The model; and the tokens at which its runs were compared, where that is not their end."""
    whole = result["compared_at_step"] == result["settings"]["steps"]
    return str(result["model"]) + ("" if whole else f", first {result['compared_tokens'] / 1e6:.1f} M tokens")


def every_run(results: dict[str, Result]) -> Rows:
    """The figures of each run, and the loss that its seconds lead to."""
    keys = "label", "mode", "seed", "compared_tokens", "compared_loss", "tokens_per_second", "peak_bytes"
    for row in ({**result, **run} for result in models(results) for run in result["runs"]):
        yield {key: row[key] for key in (*keys, "seconds_to_target", "target")}


def speeds(results: dict[str, Result]) -> Rows:
    """The mean over seeds of each mode's speed, memory and time to the target, and BF16's."""
    for result in models(results):
        means = {key: mean_of(result, key) for key in ("tokens_per_second", "peak_bytes", "seconds_to_target")}
        of = {mode: Fields({key: each[mode] for key, each in means.items()}) for mode in means["peak_bytes"]}
        yield from ({"label": result["label"], "mode": mode, "ours": of[mode], "base": of[BASE]} for mode in of)


def mean_of(result: Result, key: str) -> dict[str, float]:
    """The mean of a figure over the seeds of each mode."""
    modes = dict.fromkeys(run["mode"] for run in result["runs"])
    return {mode: statistics.mean(run[key] for run in result["runs"] if run["mode"] == mode) for mode in modes}


def resolved(interval: list[float] | None) -> str:
    cannot = interval is None or interval[0] <= 0 <= interval[1]
    return "no: these runs cannot tell the gap from zero" if cannot else "yes"


def curves(results: dict[str, Result]) -> Rows:
    """The mean loss over seeds by tokens, while all runs of a model go on."""
    for result in models(results):
        for at, point in enumerate(result["runs"][0]["evaluations"]):
            if point["step"] > result["compared_at_step"]:
                break
            tokens = result["compared_tokens"] * point["step"] / result["compared_at_step"]
            losses: dict[str, list[float]] = {}
            for run in result["runs"]:
                losses.setdefault(run["mode"], []).append(run["evaluations"][at]["loss"])
            for mode, each in losses.items():
                yield {"label": result["label"], "tokens": tokens, "mode": mode, "loss": statistics.mean(each)}


# --- Small vision models ---------------------------------------------------------------------------------------


def gaps(result: Result, task: str) -> Rows:
    """For each figure and recipe: the mean difference to BF16 of the same seed, its interval, and BF16's spread."""
    recipes = list(dict.fromkeys(run["recipe"] for run in result[task]))
    for key, name, form in FIGURES[task]:
        values = {r: [run[key] for run in result[task] if run["recipe"] == r] for r in recipes}
        spread = max(values[BASE]) - min(values[BASE])
        for recipe in recipes[1:]:
            differences = [ours - base for base, ours in zip(values[BASE], values[recipe], strict=True)]
            found = ratio(differences, [1.0] * len(differences))
            interval = found.low or 0.0, found.high or 0.0
            figures = {"base": statistics.mean(values[BASE]), "mean": found.value, "spread": spread}
            yield {"figure": name, "recipe": recipe, "form": form, "interval": interval, **figures}


def lost(result: Result) -> str:
    """A sentence on each recipe that lowers the accuracy by more than chance."""
    rows = [row for row in gaps(result, "classifier") if row["figure"] == "accuracy" and row["interval"][1] < 0]
    return " ".join(
        f"`{row['recipe']}` costs accuracy here: {-row['interval'][1]:.1%} to {-row['interval'][0]:.1%} of all images. "
        "The layer behind it was not looked for."
        for row in rows
    )


def converted_layers(shapes: Result) -> Rows:
    """The layers whose speed was predicted."""
    for name, cell in shapes.items():
        for mode, facts in cell["conversion"].items():
            for layer, speed in facts.get("predicted", {}).items():
                if speed is not None:
                    left = facts["left"].get(layer, "no")
                    yield {"blocks": name, "mode": mode, "layer": layer, "predicted": speed, "left": left}
