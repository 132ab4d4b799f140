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
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # verification imports models and transformers, which the page of a run does without
    from octavo.verification.findings import Invocation, LayerReport, Report

_ASSETS = files("octavo.report") / "assets"
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
    """A chart of lines, drawn over each other; its `id` is unique in the page, and its labels have the unit.

    `names` stand in place of the numbers 0, 1, ... of the x axis, and `marks` are places on it, each with a text.
    `points` are drawn without lines between them; the y axis has `zero`; between the lines of a pair in `bands`, the
    upper and the lower one, the chart is shaded. Charts with the same word in `cursors` share their cursors.
    """

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

    def to_dict(self) -> dict[str, Any]:
        lines = [vars(line) | {"x": list(line.x), "y": list(line.y)} for line in self.lines]
        return vars(self) | {"lines": lines}


@dataclass(frozen=True)
class Place:
    """A layer of a run, "" for the whole model, and a step of it or None."""

    run: str
    layer: str
    step: int | None = None

    def attributes(self) -> str:
        """As attributes of an HTML element."""
        step = "" if self.step is None else f' data-step="{self.step}"'
        return f' data-run="{escape(self.run)}" data-layer="{escape(self.layer)}"{step}'


@dataclass
class Page:
    """A page, to which parts are added in their order.

    Attributes:
        title: of the window, plain text.
        parts: HTML.
        charts: those of `figure`.
        data: further values for the script, by name.
    """

    title: str
    parts: list[str] = field(default_factory=list)
    charts: list[LineChart] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)

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
        style = _asset("uPlot.min.css") + _asset("page.css")
        drawn = bool(self.charts or self.data)
        scripts = [_library(), _script()] if drawn else []
        head = [
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, scripts)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(self.title)}</title>\n<style>{style}</style>",
        ]
        body = [_NO_SCRIPT, *self.parts, self._block()] if drawn else self.parts
        body = [*body, *(f"<script>{script}</script>" for script in scripts)]
        lines = ['<!doctype html>\n<html lang="en">\n<head>', *head, "</head>\n<body>", *body, "</body>\n</html>\n"]
        return "\n".join(lines)

    def _block(self) -> str:
        """The values of the charts. A text of JSON cannot end the block: it holds no "<"."""
        data = {"charts": [chart.to_dict() for chart in self.charts], **self.data}
        text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        return f'<script type="application/json" id="data">{text}</script>'


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    remark: str = "",
    places: Sequence[Place] = (),
) -> str:
    """A table of text in a box that scrolls, with a heading above it and a remark below it.

    `places` has the layer of each row: the filter of layers hides and shows the rows, and where a place has a step, the
    name of the layer becomes a button that shows it in the heat map.
    """
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = []
    for at, row in enumerate(rows):
        place = places[at].attributes() if places else ""
        body.append(f"<tr{place}>" + "".join(_cell(text) for text in row) + "</tr>")
    heading = f"<h2>{escape(title)}</h2>\n" if title else ""
    below = f'\n<p class="remark">{escape(remark)}</p>' if remark else ""
    label = escape(title or "table")
    box = f'<div class="wide" tabindex="0" role="region" aria-label="{label}">'
    return f"{heading}{box}<table>\n<tr>{head}</tr>\n" + "\n".join(body) + f"\n</table></div>{below}"


def paragraphs(texts: Iterable[str]) -> str:
    """Remarks, each a paragraph."""
    return "\n".join(f'<p class="remark">{escape(text)}</p>' for text in texts)


def footer(date: str, command: str, versions: Mapping[str, str]) -> str:
    """The time, the packages and the command that a page was made with."""
    packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f'<p class="run">{escape(date)}, {escape(packages)}</p>\n<p class="run"><code>{escape(command)}</code></p>'


def _cell(text: str) -> str:
    return f'<td class="text">{escape(text)}</td>' if len(text) > _LONG else f"<td>{escape(text)}</td>"


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _library() -> str:
    return f"/*!\nuPlot 1.6.32\n{_asset('uPlot.LICENSE')}*/\n{_asset('uPlot.iife.min.js')}"


def _script() -> str:
    """The script of a page: the files of assets/page/ in one function, which keeps their names from the page's."""
    parts = "\n".join(_asset(f"page/{name}.js") for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _policy(style: str, scripts: Iterable[str]) -> str:
    allowed = " ".join(_hash(script) for script in scripts) or "'none'"
    return f"default-src 'none'; style-src {_hash(style)}; script-src {allowed}; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# ---- The page of `octavo verify`: the tables of the report, and a chart of the SQNR of each layer.


def page_of_report(report: Report, invocation: Invocation) -> Page:
    """The page of a report."""
    page = Page(f"octavo verify: {report.packed.name}")
    source = "" if report.against is None else f" packed from {escape(str(report.against))}"
    page.add(
        f"<h1>{escape(str(report.packed))}</h1>",
        f"<p>{escape(report.architecture)}{source}</p>",
    )
    page.add_verdict(report.verdict, good=report.ok)
    page.add(_findings(report), paragraphs(report.remarks))
    for section in report.sections():
        page.add(table(section.columns, section.rows, title=section.title, remark=section.remark))
        if section.title == "Layers" and (lines := _lines(report.layers)):
            names = [layer.name for layer in report.layers]
            page.add_chart(LineChart("sqnr", "SQNR of the layers", "layer", "dB", lines, names=names, points=True))
    page.add(footer(invocation.date, invocation.command, invocation.versions))
    return page


def _findings(report: Report) -> str:
    rows = [f"<li>{escape(finding.kind)} {escape(str(finding))}</li>" for finding in report.findings]
    return "<ul>\n" + "\n".join(rows) + "\n</ul>" if rows else ""


def _lines(layers: list[LayerReport]) -> list[Line]:
    """The SQNR of the weights and of the outputs, where they were measured."""
    measured = (
        ("weight", [layer.weight_sqnr for layer in layers]),
        ("output", [layer.output_sqnr for layer in layers]),
    )
    found = [
        (name, [round(db, 3) if db is not None and math.isfinite(db) else None for db in values])
        for name, values in measured
    ]
    used = [(name, values) for name, values in found if any(db is not None for db in values)]
    return [Line(name, range(len(layers)), values, colour) for colour, (name, values) in enumerate(used)]
