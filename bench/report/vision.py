"""Differences of docs/vision.md: small vision models in FP8 beside BF16 of the same seed."""

import math
import statistics
from collections.abc import Iterator

from bench.report.filler import Result, Row
from octavo.evaluation.metrics import student_quantile

BASE = "bf16"
# The figures of each task: the key in the result, the heading, and the form of a value.
FIGURES = {
    "classifier": (("accuracy", "accuracy", ".1%"), ("loss", "loss", ".4f")),
    "diffusion": (("frechet", "Fréchet distance", ".4f"), ("loss", "loss", ".4f"), ("recognized", "recognized", ".1%")),
}


def gaps(result: Result, task: str) -> Iterator[Row]:
    """For each figure and recipe: the mean difference to BF16 of the same seed, its interval, and BF16's spread."""
    recipes = list(dict.fromkeys(run["recipe"] for run in result[task]))
    for key, name, form in FIGURES[task]:
        values = {r: [run[key] for run in result[task] if run["recipe"] == r] for r in recipes}
        spread = max(values[BASE]) - min(values[BASE])
        for recipe in recipes[1:]:
            differences = [ours - base for base, ours in zip(values[BASE], values[recipe], strict=True)]
            mean, count = statistics.mean(differences), len(differences)
            half = student_quantile(count - 1) * statistics.stdev(differences) / math.sqrt(count)
            yield {
                "figure": name,
                "recipe": recipe,
                "base": format(statistics.mean(values[BASE]), form),
                "mean": format(mean, "+" + form),
                "interval": [mean - half, mean + half],
                "form": "+" + form,
                "spread": format(spread, form),
                "resolved": "yes" if abs(mean) > half else "no",
            }


def lost(result: Result) -> str:
    """A sentence on each recipe that lowers the accuracy by more than chance."""
    rows = [row for row in gaps(result, "classifier") if row["figure"] == "accuracy" and row["interval"][1] < 0]
    return " ".join(
        f"`{row['recipe']}` costs accuracy here: {-row['interval'][1]:.1%} to {-row['interval'][0]:.1%} of all images. "
        "The layer behind it was not looked for."
        for row in rows
    )


def converted_layers(shapes: Result) -> Iterator[Row]:
    """The layers whose speed was predicted."""
    for name, cell in shapes.items():
        for mode, facts in cell["conversion"].items():
            for layer, speed in facts.get("predicted", {}).items():
                if speed is not None:
                    left = facts["left"].get(layer, "no")
                    yield {"blocks": name, "mode": mode, "layer": layer, "predicted": speed, "left": left}
