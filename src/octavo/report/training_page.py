"""The page of `octavo report`: runs of training beside each other, and what FP8 did in their layers."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from typing import Any, NamedTuple

import numpy as np

from octavo.numerics.formats import FP8_FORMATS
from octavo.report import heat_maps
from octavo.report.page import Line, LineChart, Page, paragraphs, place, read_asset, table
from octavo.train.run_records import ONE_SEED, RunData, Series, different_settings, recipe_name
from octavo.util import number, plural
from octavo.watching.storage import BINADES, GEMMS, OPERANDS, Array, Event, Watched

_POINTS = 4000  # of a line
_COLUMNS = 500  # of a heat map
_HISTOGRAMS = 64  # steps with a histogram
_GRID_BYTES = 8_000_000  # of all heat maps of a page; base64 makes a third more
_HISTOGRAM_BYTES = 4_500_000
_EVENTS = 1000  # rows of the table
_MARKS = 200  # events in a chart

_CHARTS = (
    ("loss", "Loss", "loss", ("loss", "evaluation_loss")),
    ("speed", "Speed", "tokens/s", ("tokens_per_second",)),
    ("gradient", "Gradient norm", "norm", ("gradient_norm",)),
    ("memory", "Peak memory", "GB", ("peak_memory",)),
)
_SUFFIX = {"evaluation_loss": " evaluation"}
_UNITS = {"peak_memory": 1e-9}
_BY_KEY = {metric.key: metric for metric in heat_maps.METRICS}

_HINT = (
    "Drag across a chart of lines to zoom; a double-click or Escape shows all of it. Each chart takes the arrow keys, "
    "and shows the values at its cursor below it."
)


def page_of_runs(runs: Sequence[RunData]) -> Page:
    """The page of one run or of several side by side. Long lines are thinned to the extremes of their parts."""
    page = Page("octavo report: " + ", ".join(run.name for run in runs))
    page.add(f"<h1>{escape(', '.join(run.name for run in runs))}</h1>")
    for text, good in [verdict(run, alone=len(runs) == 1) for run in runs] + gap_verdicts(runs):
        page.add_verdict(text, good=good)
    facts = [run_facts(run) for run in runs]
    names = dict.fromkeys(name for each in facts for name in each)
    rows = [(name, *(each.get(name, "") for each in facts)) for name in names]
    page.add(table(("", *(run.name for run in runs)), rows))
    page.add(paragraphs(_remarks(runs)), _kinds_of_events(runs), paragraphs([_HINT]))
    events = [(f"{run.name}, " if len(runs) > 1 else "", e) for run, e in _all_events(runs) if not e.undone]
    marks = [(e.step, f"{of_run}{e.rule}: {e.message}") for of_run, e in events[-_MARKS:]]
    for name, title, unit, keys in _CHARTS:
        if lines := _lines(runs, keys):
            zero = name == "memory"  # a fraction of a percent is no rise
            page.add_chart(LineChart(name, title, "step", unit, lines, marks=marks, zero=zero, cursors="steps"))
        if name == "loss" and (lines := [line for each in gaps(runs) for line in each.lines()]):
            bands = [(at + 2, at + 1) for at in range(0, len(lines), 3)]
            chart = LineChart("gap", f"Gap of the loss to {runs[0].name}", "step", "%", lines, zero=True, bands=bands,
                              cursors="steps")  # fmt: skip
            page.add_chart(chart, _BAND)
    watched = [run for run in runs if run.watched is not None and len(heat_maps.sampled_steps(run.watched))]
    if watched:
        page.data |= _watch_data(watched)
        page.add(read_asset("page/watch.html").rstrip())
    named = [(run, f": {run.name}" if len(runs) > 1 else "") for run in runs]
    page.add(*(_what_ran_where(*each) for each in named), *(_experts(*each) for each in named))
    page.add(_events(runs), _settings(runs))
    return page


def _remarks(runs: Sequence[RunData]) -> list[str]:
    if len(runs) == 1:
        return list(runs[0].remarks)
    return [f"{run.name}: {remark}" for run in runs for remark in run.remarks] + ([] if gaps(runs) else [ONE_SEED])


def _lines(runs: Sequence[RunData], keys: Sequence[str]) -> list[Line]:
    return [
        Line(run.name + _SUFFIX.get(key, ""), *thin(series, _UNITS.get(key, 1.0)), colour, dashed=key in _SUFFIX)
        for colour, run in enumerate(runs)
        for key in keys
        if (series := run.series.get(key)) is not None
    ]


def thin(series: Series, unit: float = 1.0) -> tuple[list[int], list[float | None]]:
    """The steps and values of a series in a unit: 4,000 at most, the extremes of the parts of a long one."""
    steps, kept = [*series], [*range(len(series))]
    if len(steps) > _POINTS:
        parts = np.array_split(np.arange(len(steps)), _POINTS // 2)
        finite = np.nan_to_num([*series.values()], nan=np.inf)  # argmax finds it
        kept = sorted({int(part[pick(finite[part])]) for part in parts for pick in (np.argmin, np.argmax)})
    values = [series[steps[at]] * unit for at in kept]
    return [steps[at] for at in kept], [float(f"{v:.6g}") if math.isfinite(v) else None for v in values]


def _all_events(runs: Iterable[RunData]) -> list[tuple[RunData, Event]]:
    return [(run, event) for run in runs if run.watched is not None for event in run.watched.events]


def _watch_data(runs: Sequence[RunData]) -> dict[str, Any]:
    watched = [_watched(run, run.watched, len(runs)) for run in runs if run.watched is not None]
    used = {name for each in watched for layer in each["layers"] for name in layer["formats"].values()}
    return {
        "watched": watched,
        "metrics": [vars(metric) for metric in heat_maps.METRICS],
        "operands": {"x": "x, the input", "w": "w, the weight", "dy": "dy, the gradient of the output"},
        "formats": {name: heat_maps.code_points(name) for name in sorted(used & FP8_FORMATS.keys())},
        "binades": BINADES,
    }


def _watched(run: RunData, watched: Watched, runs: int) -> dict[str, Any]:
    layers = max(len(watched.layers), 1)
    fits = _GRID_BYTES // runs // (2 * layers * sum(3 if metric.operands else 1 for metric in heat_maps.METRICS))
    steps = heat_maps.sampled_steps(watched)
    columns = heat_maps.columns_of(steps, min(_COLUMNS, max(fits, 20)))
    grids = {
        key: {name: heat_maps.encode_grid(values, _BY_KEY[key]) for name, values in found.items()}
        for key, found in heat_maps.metric_grids(watched, columns).items()
    }
    fits = _HISTOGRAM_BYTES // runs // (2 * layers * 4 * BINADES)
    return {
        "name": run.name,
        "layers": [{"name": layer.name, "formats": layer.formats} for layer in watched.layers],
        "columns": columns,
        "grids": grids,
        "histograms": heat_maps.histograms_at(watched, heat_maps.spread(steps, min(_HISTOGRAMS, max(fits, 2)))),
    }


def _what_ran_where(run: RunData, of_run: str) -> str:
    rows, why = gemm_rows(run.watched) if run.watched is not None else (recipe_rows(run.precision), "")
    remark = "The precision and the kernel of y, the output; dx, the gradient of the input; dw, that of the weight."
    remark += f" All in FP8: {why}." if why else ""
    places = [place(run.name, row["layer"]) for row in rows] if run.watched is not None else []
    return _table(f"What ran where{of_run}", rows, remark, places)


def _experts(run: RunData, of_run: str) -> str:
    rows = expert_rows(run.watched) if run.watched is not None else []
    remark = "The last sample. A load is an expert's rows over the mean of all. The worst expert has the lowest SQNR."
    return _table(f"Experts{of_run}", rows, remark, [place(run.name, row["experts"]) for row in rows])


def _table(title: str, rows: Sequence[Mapping[str, str]], remark: str = "", places: Sequence[str] = ()) -> str:
    """A table of rows, each the text by column, without the columns that are empty in all of them; "" without rows."""
    used = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
    cells = [[row[name] for name in used] for row in rows]
    return table(used, cells, title=title, remark=remark, places=places) if rows else ""


def _kinds_of_events(runs: Sequence[RunData]) -> str:
    kinds: dict[tuple[str, str, str], list[Event]] = {}
    for run, event in _all_events(runs):
        kinds.setdefault((run.name if len(runs) > 1 else "", event.rule, event.operand or ""), []).append(event)
    if not kinds:
        none = '<h2>Events</h2>\n<p class="remark">No event was recorded.</p>'
        return none if any(run.watched is not None for run in runs) else ""
    rows = []
    for (name, rule, operand), events in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
        layers = dict.fromkeys(event.layer for event in events if event.layer)
        where = plural(len(layers), "layer") if len(layers) > 1 else next(iter(layers), "")
        steps = [event.step for event in events]
        ends = {"first step": str(min(steps)), "last step": str(max(steps)), "the first": events[0].message}
        rows.append({"run": name, "rule": rule, "operand": operand, "count": str(len(events)), "where": where, **ends})
    return _table("Events", rows)


def _events(runs: Sequence[RunData]) -> str:
    events = _all_events(runs)
    rows = [
        {
            "run": run.name if len(runs) > 1 else "", "step": str(event.step), "rule": event.rule,
            "layer": event.layer or "", "operand": event.operand or "", "message": event.message,
            "action": "undone" if event.undone else event.action or "",
        }
        for run, event in events[-_EVENTS:]
    ]  # fmt: skip
    remark = f"The last {_EVENTS} of {len(events)} events." if len(events) > _EVENTS else ""
    places = [place(run.name, event.layer or "", event.step) for run, event in events[-_EVENTS:]]
    return _table("Every event", rows, remark, places)


def _settings(runs: Sequence[RunData]) -> str:
    known = [run for run in runs if run.settings]
    different = different_settings([run.settings for run in known]) if len(known) > 1 else {}
    if not different:
        return ""
    rows = [(name, *("" if value is None else str(value) for value in values)) for name, values in different.items()]
    return table(("", *(run.name for run in known)), rows, title="Settings that differ")


def run_facts(run: RunData) -> dict[str, str]:
    """The figures that the run has, by their names."""
    wrong = sum(len(run.wrong_steps(key)) for key in run.series)
    data = run.settings.get("data", "")
    found = {
        "written": run.written,
        "data": ", ".join(map(str, data)) if isinstance(data, list) else str(data),
        **{name: str(run.started.get(name, "")) for name in ("command", "machine", "versions")},
        "recipe": recipe_name(run.settings),
        "steps": _steps(run),
        "loss": run.last("loss"),
        "evaluation loss": run.last("evaluation_loss"),
        "tokens/s": number(run.tokens_per_second, ",.0f"),
        "MFU": number(run.last_number("mfu"), ".1%"),
        "peak memory": f"{run.peak_memory / 1e9:.2f} GB" if run.peak_memory else "",
        "inf or NaN": plural(wrong, "value") if wrong else "",
    }
    if run.watched is not None:
        every = "step" if run.watched.interval == 1 else f"{run.watched.interval} steps"
        found["layers watched"] = f"{len(run.watched.layers)}, every {every}"
        gemms = Counter(gemm.precision for layer in run.watched.layers for gemm in layer.gemms.values())
        found["GEMMs"] = ", ".join(f"{count} {precision}" for precision, count in gemms.most_common())
        undone = sum(event.undone for event in run.watched.events)
        back = f", and {undone} of steps from which the run went back" if undone else ""
        found["events"] = f"{len(run.watched.events) - undone}{back}"
    return {name: text for name, text in found.items() if text}


def expert_rows(watched: Watched) -> list[dict[str, str]]:
    """The load of each stack of experts in the last sample, and its worst expert, by column of a table."""
    rows = []
    for record in watched.experts[watched.experts["step"] == watched.experts["step"].max(initial=0)]:
        row = {
            "experts": watched.layers[record["layer"]].name,
            "largest load": "" if np.isnan(record["load"]) else f"{record['load']:.2f}x, expert {record['fullest']}",
            "idle": f"{record['idle']} of {record['experts']}",
        }
        for operand, expert, db in zip(OPERANDS, record["worst"], record["sqnr"], strict=True):
            row[f"worst {operand}"] = "" if np.isnan(db) else f"expert {expert}, {db:.1f} dB"
        rows.append(row)
    return rows


def gemm_rows(watched: Watched) -> tuple[list[dict[str, str]], str]:
    """A row for each layer, by column: the precision of its GEMMs; and the reasons that all layers in FP8 have."""
    whys = [
        dict.fromkeys(part for gemm in layer.gemms.values() for part in gemm.why.split("; ") if part)
        for layer in watched.layers
    ]
    layers = list(zip(watched.layers, whys, strict=True))
    in_fp8 = [why for layer, why in layers if any(gemm.precision == "fp8" for gemm in layer.gemms.values())]
    of_all = [part for part in in_fp8[0] if all(part in why for why in in_fp8)] if len(in_fp8) > 1 else []
    rows = []
    for layer, why in layers:
        shape = " x ".join(map(str, layer.shape))
        row = {"layer": layer.name, "class": layer.kind, "shape": shape, "recipe": layer.recipe}
        for name in GEMMS:
            gemm = layer.gemms.get(name)
            row[name] = f"{gemm.precision} {gemm.kernel}".strip() if gemm else ""
        rows.append(row | {"why": "; ".join(part for part in why if part not in of_all)})
    return rows, "; ".join(of_all)


def recipe_rows(precision: Mapping[str, Any]) -> list[dict[str, str]]:
    """The same for a run that was not watched, by recipe: what `octavo.train.step_metrics.precision_of` recorded."""
    return [
        {"recipe": name, "layers": plural(len(each["layers"]), "layer")}
        | {gemm: str(each.get(gemm, "")) for gemm in ("y", "dx", "dw")}
        for name, each in precision.get("recipes", {}).items()
    ]


def _steps(run: RunData) -> str:
    planned, done = run.settings.get("steps"), run.last_step
    return f"{done:,} of {planned:,}" if isinstance(planned, int) and planned > done else f"{done:,}"


def verdict(run: RunData, *, alone: bool = True) -> tuple[str, bool]:
    """A sentence on a run, and True if it went well: its loss is a number, and the watch found nothing."""
    name, loss = "" if alone else f"{run.name}: ", run.series.get("loss")
    if loss is not None and run.last_number("loss") is None:
        return f"{name}The loss is inf or NaN at step {max(loss):,}.", False
    ended = f"{name}{'The run is at' if alone else 'at'} step {_steps(run)}"
    if loss is not None:
        ended += f" with a loss of {run.last('loss')}"
    if run.watched is None:
        return f"{ended}; its layers were not watched.", True
    kinds = Counter(event.rule for event in run.watched.events if not event.undone).most_common()
    bad = np.unique(run.watched.operands["layer"][run.watched.operands["nonfinite"] > 0])
    if not kinds and len(bad):  # a loop of one's own may judge by no rule
        return f"{ended}, and {plural(len(bad), 'watched layer')} had inf or NaN.", False
    if not kinds:
        return f"{ended}, and the watch found nothing.", True
    rules = ", ".join(f"{count} {rule}" for rule, count in kinds[:3]) + (", ..." if len(kinds) > 3 else "")
    return f"{ended}, and the watch recorded {plural(sum(n for _, n in kinds), 'event')}: {rules}.", False


# ---- The gap between the training losses of two runs: means of windows, and the noise of such a mean.
#
# With the losses a_s and b_s of step s, d_s = 100 (b_s - a_s) / a_s percent. A point is the mean of n neighbouring d_s;
# its band reaches two standard errors, 2 std(d) / sqrt(n), to each side. Runs that see the same batches have less noise
# in d than in their losses. Another seed adds a difference that the band does not have.


_BAND = (
    "Each point is the mean over a window of logged steps, the shaded band two standard errors of this mean. "
    "A gap whose band holds 0 is within the noise. Another seed adds a difference that the band does not have."
)
_LEAST = 8  # steps that two runs have in common


class Gap(NamedTuple):
    """The gap of a run to the first one, in percent: at `steps` [n] the means [n], and half the width of the band."""

    name: str
    colour: int
    steps: Array
    mean: Array
    half: Array

    def lines(self) -> list[Line]:
        """The means, and the lower and the upper end of the band."""
        ends = (("", self.mean), (", low", self.mean - self.half), (", high", self.mean + self.half))
        series = [(end, dict(zip(self.steps.tolist(), values.tolist(), strict=True))) for end, values in ends]
        return [Line(self.name + end, *thin(each), self.colour, dashed=end != "") for end, each in series]


def gaps(runs: Sequence[RunData]) -> list[Gap]:
    """The gaps of all runs but the first to it; none where they have few steps in common."""
    found = []
    for colour, run in enumerate(runs[1:], 1):
        a, b = (each.series.get("loss", {}) for each in (runs[0], run))
        steps = np.array([step for step in a if step in b], np.int64)
        at_a, at_b = (np.array([each[step] for step in steps.tolist()]) for each in (a, b))
        d = 100 * (at_b - at_a) / at_a
        known = np.isfinite(d)
        steps, d = steps[known], d[known]
        if len(d) >= _LEAST:
            windows = np.lib.stride_tricks.sliding_window_view(d, max(len(d) // 10, _LEAST // 2))
            width = windows.shape[1]
            half = 2 * windows.std(1, ddof=1) / math.sqrt(width)
            found.append(Gap(run.name, colour, steps[width // 2 :][: len(windows)], windows.mean(1), half))
    return found


def gap_verdicts(runs: Sequence[RunData]) -> list[tuple[str, bool]]:
    """The gap of each run at its end, in a sentence."""
    found = []
    for gap in gaps(runs):
        mean, half = gap.mean[-1], gap.half[-1]
        within = ", within the noise" if abs(mean) <= half else ""
        text = f"{gap.name} against {runs[0].name}: loss {mean:+.2f} % +- {half:.2f} % at the end{within}. {ONE_SEED}"
        found.append((text, mean <= half))
    return found


# ---- The summary of a run for the terminal, and its figures for JSON.


_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 32  # characters of a sparkline
_SHOWN = [_BY_KEY[key] for key in ("saturated", "flushed", "sqnr")]  # the metrics whose worst layers the terminal shows
_WORST = 4


def sparkline(values: Array | list[float]) -> str:
    """A line of at most 32 block characters: means of parts, from the smallest value to the largest; × is inf or NaN.

    Example:
        >>> sparkline(np.array([1.0, 2.0, 4.0, 8.0]))
        '▁▂▄█'
    """
    parts = np.array_split(np.asarray(values, np.float64), min(_WIDTH, len(values))) if len(values) else []
    means = [float(part.mean()) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    span = high - low if high > low else 1.0
    places = [int((mean - low) / span * len(_BLOCKS)) if math.isfinite(mean) else None for mean in means]
    return "".join("×" if place is None else _BLOCKS[min(place, len(_BLOCKS) - 1)] for place in places)


def worst_layers(watched: Watched) -> list[tuple[str, str, str, str, str]]:
    """The worst layers and operands of the metrics that matter most, the worst first: the metric, the layer, the
    operand, the worst value, and a sparkline over the steps. A share of 0 is not listed."""
    found, grids = [], heat_maps.metric_grids(watched, heat_maps.columns_of(heat_maps.sampled_steps(watched), _WIDTH))
    for metric in _SHOWN:
        sign = -1 if metric.worst == "highest" else 1
        rows = [
            (sign * worst, layer, operand, worst, line)
            for operand, grid in grids.get(metric.key, {}).items()
            for layer, line in enumerate(grid)
            if (worst := _worst(line, metric)) is not None and not (metric.unit == "share" and worst == 0)
        ]
        for _, layer, operand, worst, line in sorted(rows, key=lambda row: row[:3])[:_WORST]:
            shown = f"{100 * worst:.3g} %" if metric.unit == "share" else f"{worst:.3g} {metric.unit}"
            name, over_steps = watched.layers[layer].name, sparkline(line[~np.isnan(line)])
            found.append((metric.label, name, operand, shown, over_steps))
    return found


def to_dict(run: RunData) -> dict[str, Any]:
    """The figures of a run for JSON. inf and NaN become None."""
    return {
        "run": str(run.path),
        "name": run.name,
        "recipe": recipe_name(run.settings) or None,
        "step": run.last_step,
        "series": {key: _series(run, key) for key in run.series},
        "precision": dict(run.precision),
        "remarks": list(run.remarks),
        "watched": None if run.watched is None else _watched_summary(run.watched),
        "events": [event.to_dict() for event in run.watched.events] if run.watched is not None else [],
    }


def _series(run: RunData, key: str) -> dict[str, Any]:
    numbers = [*run.numbers(key).values()]
    return {
        "last": run.last_number(key),
        "last_number": numbers[-1] if numbers else None,
        "lowest": min(numbers, default=None),
        "highest": max(numbers, default=None),
        "median": statistics.median(numbers) if numbers else None,
        "inf_or_nan_at": run.wrong_steps(key),
    }


def _watched_summary(watched: Watched) -> dict[str, Any]:
    """The layers, each with the worst value of each metric over all samples."""
    steps, layers = heat_maps.sampled_steps(watched), []
    worst = heat_maps.metric_grids(watched, heat_maps.columns_of(steps, 1))
    for at, layer in enumerate(watched.layers):
        figures: dict[str, dict[str, float | None]] = {}
        for key, grids in worst.items():
            for operand, grid in grids.items():
                figures.setdefault(operand, {})[key] = _worst(grid[at], _BY_KEY[key])
        layers.append({**asdict(layer), "figures": figures})
    return {
        "interval": watched.interval,
        "samples": len(steps),
        "worst": {metric.key: metric.worst for metric in heat_maps.METRICS},
        "layers": layers,
    }


def _worst(values: Array, metric: heat_maps.Metric) -> float | None:
    finite = values[np.isfinite(values)]
    worst = np.max if metric.worst == "highest" else np.min
    return float(worst(finite)) if len(finite) else None
