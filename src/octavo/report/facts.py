"""The figures of a run in words, for the page and the terminal."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.report.runs import RunData, Series
from octavo.telemetry.storage import Watched
from octavo.words import plural

FACTS = (
    "recipe", "steps", "loss", "evaluation loss", "tokens/s", "MFU", "peak memory", "inf or NaN", "layers watched",
    "GEMMs", "events",
)  # fmt: skip


def run_facts(run: RunData) -> dict[str, str]:
    """The figures that the run has, by the names of `FACTS`."""
    last = {key: series.last for key, series in run.series.items()}
    speed = run.series.get("tokens_per_second")
    wrong = sum(len(series.wrong_steps) for series in run.series.values())
    memory = peak_memory(run)
    found = {
        "recipe": run.recipe,
        "steps": _steps(run),
        "loss": _loss(run.series.get("loss")),
        "evaluation loss": _loss(run.series.get("evaluation_loss")),
        "tokens/s": _number(float(np.median(speed.finite)) if speed and len(speed.finite) else None, ",.0f"),
        "MFU": _number(last.get("mfu"), ".1%"),
        "peak memory": f"{memory / 1e9:.2f} GB" if memory else "",
        "inf or NaN": plural(wrong, "value") if wrong else "",
    }
    if run.watched is not None:
        every = "step" if run.watched.interval == 1 else f"{run.watched.interval} steps"
        found["layers watched"] = f"{len(run.watched.layers)}, every {every}"
        found["GEMMs"] = gemm_counts(run.watched)
        undone = sum(event.undone for event in run.watched.events)
        back = f", and {undone} of steps from which the run went back" if undone else ""
        found["events"] = f"{len(run.watched.events) - undone}{back}"
    return {name: text for name, text in found.items() if text}


def expert_rows(watched: Watched) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The table of experts in the last sample: the load of each stack, and the worst expert. Its columns and rows."""
    rows = []
    last = watched.experts[watched.experts["step"] == watched.experts["step"].max(initial=0)]
    for record in last:
        load = "" if np.isnan(record["load"]) else f"{record['load']:.2f}x, expert {record['fullest']}"
        pairs = zip(record["worst"], record["sqnr"], strict=True)
        worst = ["" if np.isnan(db) else f"expert {expert}, {db:.1f} dB" for expert, db in pairs]
        name, idle = watched.layers[record["layer"]].name, f"{record['idle']} of {record['experts']}"
        rows.append((name, load, idle, *worst))
    return ("experts", "largest load", "idle", "worst x", "worst w", "worst dy"), rows


def peak_memory(run: RunData) -> int | None:
    """The largest peak memory that the run logged, in bytes."""
    memory = run.series.get("peak_memory")
    return int(memory.finite.max()) if memory and len(memory.finite) else None


def gemm_rows(watched: Watched) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The table of what each GEMM of each layer ran in: its columns and rows."""
    rows = []
    for layer in watched.layers:
        gemms = [layer.gemms.get(name) for name in ("y", "dx", "dw", "recomputation")]
        ran = [f"{gemm.precision} {gemm.kernel}".strip() if gemm else "" for gemm in gemms]
        why = dict.fromkeys(gemm.why for gemm in gemms if gemm and gemm.why)
        shape = " x ".join(map(str, layer.shape))
        rows.append((layer.name, layer.kind, shape, layer.recipe, *ran, "; ".join(why)))
    return ("layer", "class", "shape", "recipe", "y", "dx", "dw", "recomputation", "why"), rows


def recipe_rows(precision: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The same for a run that was not watched, by recipe: what `octavo.train.instrument.precision_of` recorded."""
    recipes: Mapping[str, Any] = precision.get("recipes", {})
    rows = [
        (name, plural(len(each["layers"]), "layer"), *(str(each.get(gemm, "")) for gemm in ("y", "dx", "dw")))
        for name, each in recipes.items()
    ]
    return ("recipe", "layers", "y", "dx", "dw"), rows


def gemm_counts(watched: Watched) -> str:
    """How many GEMMs ran in which precision, such as "216 fp8, 3 bf16"."""
    gemms = (gemm for layer in watched.layers for gemm in layer.gemms.values())
    return ", ".join(f"{count} {precision}" for precision, count in Counter(g.precision for g in gemms).most_common())


def _steps(run: RunData) -> str:
    planned = run.settings.get("steps")
    done = run.last_step
    return f"{done:,} of {planned:,}" if isinstance(planned, int) and planned > done else f"{done:,}"


def _loss(series: Series | None) -> str:
    """The last loss. Of a run that ended in inf or NaN, the last number is not its result."""
    if series is None or series.last is not None:
        return "" if series is None else _number(series.last, ".4f")
    before = "" if series.last_finite is None else ", {1:.4f} at step {0:,}".format(*series.last_finite)
    return f"inf or NaN at step {int(series.steps[-1]):,}{before}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
