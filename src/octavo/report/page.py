"""The frame of an HTML page that opens offline: one file with its style, tables and charts.

The page loads nothing. Its Content-Security-Policy allows its style and its two scripts by their hashes, and no
request. Tables and text need no script. The files of assets/page/ draw the charts from a JSON block with uPlot, a chart
library under the MIT license (assets/uPlot.LICENSE). Each chart takes the arrow keys, says the values at its cursor
below it, and shows its data as a table. A page without charts has no script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # verification imports models and transformers, which the page of a run does without
    from octavo.verification.findings import LayerReport, Report

_SCRIPTS = ("elements", "lines", "heat_map", "histogram", "watch", "start")
_NO_SCRIPT = "<noscript><p>The charts of this page need JavaScript. Its tables do not.</p></noscript>"
_LONG = 32  # a cell with more characters is text, and may be broken between words


@dataclass(frozen=True)
class Line:
    """The points of a line, `x` ascending. None in `y` leaves a gap. `colour` counts the page's colours from 0."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class LineChart:
    """A chart of lines, drawn over each other; its `id` is unique in the page, and its labels have the unit. `names`
    stand in place of the numbers 0, 1, ... of the x axis, and `marks` are places on it, each with a text. `points` are
    drawn without lines between them; the y axis has `zero`; between the lines of a pair in `bands`, the upper and the
    lower one, the chart is shaded. Charts with the same word in `cursors` share their cursors."""

    id: str
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    names: Sequence[str] = ()
    marks: Sequence[tuple[float, str]] = ()
    points: bool = False
    zero: bool = False
    bands: Sequence[tuple[int, int]] = ()
    cursors: str = ""


@dataclass
class Page:
    """A page, to which parts are added in their order."""

    title: str  # of the window, plain text
    parts: list[str] = field(default_factory=list)  # HTML
    charts: list[LineChart] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)  # further values for the script, by name

    def add(self, *parts: str) -> None:
        self.parts += [part for part in parts if part]

    def add_chart(self, chart: LineChart, remark: str = "") -> None:
        """Add a chart under its heading and a remark."""
        self.charts.append(chart)
        self.add(f"<h2>{escape(chart.title)}</h2>", paragraphs([remark] if remark else []))
        self.add(f'<figure class="chart" id="{escape(chart.id)}"></figure>')

    def add_verdict(self, text: str, *, good: bool) -> None:
        self.add(f'<p class="verdict {"right" if good else "wrong"}">{escape(text)}</p>')

    def html(self) -> str:
        """The whole page."""
        style, scripts, body = read_asset("uPlot.min.css") + read_asset("page.css"), list[str](), self.parts
        if self.charts or self.data:
            data = {"charts": [asdict(chart) for chart in self.charts], **self.data}
            # A text of JSON cannot end its block: it holds no "<".
            text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
            library = f"/*!\nuPlot 1.6.32\n{read_asset('uPlot.LICENSE')}*/\n{read_asset('uPlot.iife.min.js')}"
            parts = "\n".join(read_asset(f"page/{name}.js") for name in _SCRIPTS)
            # In a function, the names of the parts are not those of the page.
            scripts = [library, f'"use strict";\n(() => {{\n{parts}}})();\n']
            body = [_NO_SCRIPT, *body, f'<script type="application/json" id="data">{text}</script>']
            body += [f"<script>{script}</script>" for script in scripts]
        return Template(read_asset("page/frame.html")).substitute(
            title=escape(self.title), style=style, style_hash=_hash(style), body="\n".join(body),
            script_hashes=" ".join(map(_hash, scripts)) or "'none'",
        )  # fmt: skip


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    remark: str = "",
    places: Sequence[str] = (),
) -> str:
    """A table of text in a box that scrolls, with a heading above it and a remark below it. `places` has the `place` of
    each row, which the filter of layers hides and shows. The name of the layer of a place with a step becomes a button
    that shows it in the heat map."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    marked = zip(places or [""] * len(rows), rows, strict=True)
    body = [f"<tr{place}>{''.join(map(_cell, row))}</tr>" for place, row in marked]
    heading = f"<h2>{escape(title)}</h2>\n" if title else ""
    box = f'<div class="wide" tabindex="0" role="region" aria-label="{escape(title or "table")}">'
    below = f"\n{paragraphs([remark])}" if remark else ""
    return f"{heading}{box}<table>\n<tr>{head}</tr>\n" + "\n".join(body) + f"\n</table></div>{below}"


def place(run: str, layer: str, step: int | None = None) -> str:
    """The attributes of a row of a table that is of a layer of a run, "" for the whole model, and of a step."""
    at = "" if step is None else f' data-step="{step}"'
    return f' data-run="{escape(run)}" data-layer="{escape(layer)}"{at}'


def paragraphs(texts: Iterable[str]) -> str:
    """Remarks, each a paragraph."""
    return "\n".join(f'<p class="remark">{escape(text)}</p>' for text in texts)


def _cell(text: str) -> str:
    return f'<td class="text">{escape(text)}</td>' if len(text) > _LONG else f"<td>{escape(text)}</td>"


def read_asset(name: str) -> str:
    """A file of assets/."""
    return (files("octavo.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# ---- The page of `octavo verify`: the tables of the report, and a chart of the SQNR of each layer.


def page_of_report(report: Report, invocation: Mapping[str, Any]) -> Page:
    """The page of a report."""
    page = Page(f"octavo verify: {report.packed.name}")
    source = "" if report.against is None else f" packed from {escape(str(report.against))}"
    page.add(f"<h1>{escape(str(report.packed))}</h1>", f"<p>{escape(report.architecture)}{source}</p>")
    page.add_verdict(report.verdict, good=report.ok)
    if report.findings:
        rows = [f"<li>{escape(finding.kind)} {escape(str(finding))}</li>" for finding in report.findings]
        page.add("\n".join(["<ul>", *rows, "</ul>"]))
    page.add(paragraphs(report.remarks))
    for each in report.tables():
        page.add(table(each.columns, each.rows, title=each.title, remark=each.remark))
        if each.title == "Layers" and (lines := _lines(report.layers)):
            names = [layer.name for layer in report.layers]
            page.add_chart(LineChart("sqnr", "SQNR of the layers", "layer", "dB", lines, names=names, points=True))
    packages = ", ".join(f"{name} {version}" for name, version in invocation["versions"].items())
    date, command = escape(invocation["date"]), escape(invocation["command"])
    page.add(f'<p class="run">{date}, {escape(packages)}</p>', f'<p class="run"><code>{command}</code></p>')
    return page


def _lines(layers: list[LayerReport]) -> list[Line]:
    lines: list[Line] = []
    for name in ("weight", "output"):
        measured: list[float | None] = [getattr(layer, f"{name}_sqnr") for layer in layers]
        shown = [round(db, 3) if db is not None and math.isfinite(db) else None for db in measured]
        if any(db is not None for db in shown):
            lines.append(Line(name, [*range(len(layers))], shown, colour=len(lines)))
    return lines
