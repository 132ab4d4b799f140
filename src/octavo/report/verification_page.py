"""The page of `octavo verify`: the tables of the report, and a chart of the SQNR of each layer."""

import math
from html import escape

from octavo.report.page import Line, LineChart, Page, footer, paragraphs, table
from octavo.verification.report import Invocation, sections, verdict
from octavo.verification.result import LayerReport, Report


def page_of_report(report: Report, invocation: Invocation) -> Page:
    """The page of a report."""
    page = Page(f"octavo verify: {report.packed.name}")
    page.add(
        f"<h1>{escape(str(report.packed))}</h1>",
        f"<p>{escape(report.architecture)} packed from {escape(str(report.against))}</p>",
        f'<p class="verdict {"right" if report.ok else "wrong"}">{escape(verdict(report))}</p>',
        _findings(report),
        paragraphs(report.remarks),
    )
    for section in sections(report):
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
