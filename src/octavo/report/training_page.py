"""The page of `octavo report`: runs of training beside each other, and what FP8 did in their layers."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import numpy as np

from octavo.numerics.formats import FP8_FORMATS
from octavo.report.facts import FACTS, expert_rows, gemm_rows, recipe_rows, run_facts
from octavo.report.heat_maps import METRICS, Columns, encode_grid, metric_grids, sampled_steps, spread
from octavo.report.histograms import code_points, histograms_at
from octavo.report.page import Line, LineChart, Page, Place, paragraphs, table
from octavo.report.runs import RunData, Series
from octavo.telemetry.schema import BINADES, Event
from octavo.telemetry.storage import Watched
from octavo.train.records import different_settings
from octavo.verification.report import Section, without_blanks

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

_HINT = (
    "Drag across a chart of lines to zoom; a double-click or Escape shows all of it. Each chart takes the arrow keys, "
    "and shows the values at its cursor below it."
)
_WATCH = """<h2>Layers over the steps</h2>
<div class="controls">
<label>Run <select id="run"></select></label>
<label>Metric <select id="metric"></select></label>
<label>Operand <select id="operand"></select></label>
<label>Filter <input id="filter" type="search" placeholder="words of layer names"></label>
<span id="shown" role="status"></span>
</div>
<figure class="chart" id="heat"></figure>
<h2>Histogram of a tensor</h2>
<div class="controls">
<label>Layer <select id="layer"></select></label>
<label>Step <select id="step"></select></label>
</div>
<p id="histogram-caption" aria-live="polite"></p>
<figure class="chart" id="histogram"></figure>"""


def page_of_runs(runs: Sequence[RunData]) -> Page:
    """The page of one run or of several side by side.

    The charts are as exact as the page is wide: a long line is thinned to the extremes of its parts, and the samples of
    a long watch share the columns of the heat maps (`octavo.report.heat_maps`).
    """
    page = Page("octavo report: " + ", ".join(run.name for run in runs))
    page.add(f"<h1>{escape(', '.join(run.name for run in runs))}</h1>")
    facts = [run_facts(run) for run in runs]
    names = [name for name in FACTS if any(each.get(name) for each in facts)]
    rows = [(name, *(each.get(name, "") for each in facts)) for name in names]
    page.add(table(("", *(run.name for run in runs)), rows))
    page.add(paragraphs([*_remarks(runs), _HINT]))
    for name, title, unit, keys in _CHARTS:
        if lines := _lines(runs, keys):
            page.add_chart(LineChart(name, title, "step", unit, lines, marks=_marks(runs), cursors="steps"))
    watched = [run for run in runs if run.watched is not None and len(sampled_steps(run.watched))]
    if watched:
        page.data |= _watch_data(watched)
        page.add(_WATCH)
    page.add(*(_what_ran_where(run, alone=len(runs) == 1) for run in runs))
    page.add(*(_experts(run, alone=len(runs) == 1) for run in runs))
    page.add(_events(runs), _settings(runs))
    return page


def _remarks(runs: Sequence[RunData]) -> list[str]:
    return [f"{run.name}: {remark}" if len(runs) > 1 else remark for run in runs for remark in run.remarks]


def _lines(runs: Sequence[RunData], keys: Sequence[str]) -> list[Line]:
    return [
        Line(run.name + _SUFFIX.get(key, ""), *thin(series, _UNITS.get(key, 1.0)), colour, dashed=key in _SUFFIX)
        for colour, run in enumerate(runs)
        for key in keys
        if (series := run.series.get(key)) is not None
    ]


def thin(series: Series, unit: float = 1.0) -> tuple[list[int], list[float | None]]:
    """The steps and values of a series in a unit. Of a long one, the extremes of each part: 4,000 values at most."""
    kept: list[int] = list(range(len(series.steps)))
    if len(series.steps) > _POINTS:
        parts = np.array_split(np.arange(len(series.steps)), _POINTS // 2)
        values = np.nan_to_num(series.values, nan=np.inf)  # argmax finds it
        kept = sorted({int(part[pick(values[part])]) for part in parts for pick in (np.argmin, np.argmax)})
    steps, values = series.steps[kept].tolist(), series.values[kept] * unit
    return steps, [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def _marks(runs: Sequence[RunData]) -> Sequence[tuple[float, str]]:
    several = len(runs) > 1
    return [
        (event.step, f"{run.name}, {event.rule}: {event.message}" if several else f"{event.rule}: {event.message}")
        for run, event in _all_events(runs)
        if not event.undone
    ][-_MARKS:]


def _all_events(runs: Iterable[RunData]) -> list[tuple[RunData, Event]]:
    return [(run, event) for run in runs if run.watched is not None for event in run.watched.events]


def _watch_data(runs: Sequence[RunData]) -> dict[str, Any]:
    watched = [_watched(run, run.watched, len(runs)) for run in runs if run.watched is not None]
    used = {name for each in watched for layer in each["layers"] for name in layer["formats"].values()}
    return {
        "watched": watched,
        "metrics": [vars(metric) for metric in METRICS],
        "operands": {"x": "x, the input", "w": "w, the weight", "dy": "dy, the gradient of the output"},
        "formats": {name: code_points(name) for name in sorted(used & FP8_FORMATS.keys())},
        "binades": BINADES,
    }


def _watched(run: RunData, watched: Watched, runs: int) -> dict[str, Any]:
    steps, layers = sampled_steps(watched), max(len(watched.layers), 1)
    fits = _GRID_BYTES // runs // (2 * layers * sum(3 if metric.operands else 1 for metric in METRICS))
    columns = Columns(steps, min(len(steps), _COLUMNS, max(fits, 20)))
    by_key = {metric.key: metric for metric in METRICS}
    grids = {
        key: {name: encode_grid(values, by_key[key]) for name, values in found.items()}
        for key, found in metric_grids(watched, columns).items()
    }
    fits = _HISTOGRAM_BYTES // runs // (2 * layers * 4 * BINADES)
    return {
        "name": run.name,
        "layers": [{"name": layer.name, "formats": layer.formats} for layer in watched.layers],
        "columns": columns.spans,
        "grids": grids,
        "histograms": histograms_at(watched, spread(steps, min(_HISTOGRAMS, max(fits, 2)))),
    }


def _what_ran_where(run: RunData, *, alone: bool) -> str:
    columns, rows = gemm_rows(run.watched) if run.watched is not None else recipe_rows(run.precision)
    if not rows:
        return ""
    title = "What ran where" if alone else f"What ran where: {run.name}"
    remark = "The precision and the kernel of y, the output; dx, the gradient of the input; dw, that of the weight."
    places = [Place(run.name, row[0]) for row in rows] if run.watched is not None else []
    section = without_blanks(Section(title, columns, rows))
    return table(section.columns, section.rows, title=title, remark=remark, places=places)


def _experts(run: RunData, *, alone: bool) -> str:
    columns, rows = expert_rows(run.watched) if run.watched is not None else ((), [])
    if not rows:
        return ""
    remark = (
        "The last sample. A load is the rows of an expert over the mean of all. The worst expert has the lowest SQNR."
    )
    places = [Place(run.name, row[0]) for row in rows]
    return table(columns, rows, title="Experts" if alone else f"Experts: {run.name}", remark=remark, places=places)


def _events(runs: Sequence[RunData]) -> str:
    events = _all_events(runs)
    if not any(run.watched is not None for run in runs):
        return ""
    if not events:
        return '<h2>Events</h2>\n<p class="remark">No event was recorded.</p>'
    several = len(runs) > 1
    rows = [
        (*((run.name,) if several else ()), str(event.step), event.rule, event.layer or "", event.operand or "",
         event.message, "undone" if event.undone else event.action or "")
        for run, event in events[-_EVENTS:]
    ]  # fmt: skip
    columns = (*(("run",) if several else ()), "step", "rule", "layer", "operand", "message", "action")
    remark = f"The last {_EVENTS} of {len(events)} events." if len(events) > _EVENTS else ""
    places = [Place(run.name, event.layer or "", event.step) for run, event in events[-_EVENTS:]]
    return table(columns, rows, title="Events", remark=remark, places=places)


def _settings(runs: Sequence[RunData]) -> str:
    known = [run for run in runs if run.settings]
    different = different_settings([run.settings for run in known]) if len(known) > 1 else {}
    if not different:
        return ""
    rows = [(name, *("" if value is None else str(value) for value in values)) for name, values in different.items()]
    return table(("", *(run.name for run in known)), rows, title="Settings that differ")
