"""The tables of docs/vision.md: small vision models trained in BF16 and FP8, and blocks of large ones on a GPU."""

import math
import statistics
from collections.abc import Iterable

from bench.report.tables import Result, Row, details, markdown
from octavo.evaluation.metrics import student_quantile

Rows = Iterable[Row]
BASE = "bf16"
# The figures of each task: the key in the result, the heading, and the form of a value.
FIGURES = {
    "classifier": (("accuracy", "accuracy", "{:.1%}"), ("loss", "loss", "{:.4f}")),
    "diffusion": (
        ("frechet", "Fréchet distance", "{:.4f}"),
        ("loss", "loss", "{:.4f}"),
        ("recognized", "recognized", "{:.1%}"),
    ),
}


def classifier_gaps(results: dict[str, Result]) -> Rows:
    return gaps(results["vision"], "classifier")


def diffusion_gaps(results: dict[str, Result]) -> Rows:
    return gaps(results["vision"], "diffusion")


def classifier_runs(results: dict[str, Result]) -> Rows:
    return runs(results["vision"], "classifier")


def diffusion_runs(results: dict[str, Result]) -> Rows:
    return runs(results["vision"], "diffusion")


def gaps(result: Result, task: str) -> Rows:
    """For each figure and recipe: the mean difference to BF16 of the same seed, its interval, and BF16's spread."""
    recipes = list(dict.fromkeys(run["recipe"] for run in result[task]))
    for key, name, form in FIGURES[task]:
        values = {r: [run[key] for run in result[task] if run["recipe"] == r] for r in recipes}
        for recipe in recipes[1:]:
            differences = [ours - base for base, ours in zip(values[BASE], values[recipe], strict=True)]
            mean, count = statistics.mean(differences), len(differences)
            half = student_quantile(count - 1) * statistics.stdev(differences) / math.sqrt(count)
            spread = max(values[BASE]) - min(values[BASE])
            signed = form.replace("{:", "{:+")
            yield {
                "figure": name,
                "BF16, mean": form.format(statistics.mean(values[BASE])),
                "recipe": recipe,
                "difference, mean": signed.format(mean),
                "95 % interval": f"{signed.format(mean - half)} to {signed.format(mean + half)}",
                "BF16's seeds apart": form.format(spread),
                "mean within BF16's spread": "yes" if abs(mean) <= spread else "no",
            }


def runs(result: Result, task: str) -> Rows:
    for run in result[task]:
        figures = {name: form.format(run[key]) for key, name, form in FIGURES[task]}
        yield {"recipe": run["recipe"], "seed": str(run["seed"]), **figures, "FLOPs in FP8": f"{run['fp8_flops']:.1%}"}


def vision_blocks(results: dict[str, Result]) -> str:
    """The part of the page on a GPU, if it was measured there."""
    if "gpu_vision" not in results:
        return "Not measured."
    found = results["gpu_vision"]
    rows = [row for name, cell in found["shapes"].items() for row in block_rows(name, cell)]
    return f"{markdown(rows)}\n\n{details('How each layer was converted', markdown(left_rows(found['shapes'])))}"


def block_rows(name: str, cell: Result) -> Rows:
    shape = cell["shape"]
    for mode, rounds in cell["rounds"].items():
        yield {
            "blocks": f"{name}: {shape['layers']} of width {shape['width']:,}, {shape['batch']} x {shape['tokens']}",
            "mode": mode,
            "ms": f"{statistics.median(rounds):.2f}",
            "vs BF16": f"{cell['speedup'][mode]:.3f}x",
            "peak GiB": f"{cell['peak_bytes'][mode] / 2**30:.2f}",
            "SQNR of y, dx, first dw": ", ".join(f"{value:.1f}" for value in cell["db"][mode]) or "–",
        }


def left_rows(shapes: Result) -> Rows:
    for name, cell in shapes.items():
        for mode, facts in cell["conversion"].items():
            for layer, speedup in facts.get("predicted", {}).items():
                if speedup is not None:
                    yield {
                        "blocks": name,
                        "mode": mode,
                        "layer": layer,
                        "predicted": f"{speedup:.2f}x",
                        "left in BF16": facts["left"].get(layer, "no"),
                    }
