"""What `octavo verify` found as one HTML page, which needs nothing but itself: no script, no file, no network."""

from __future__ import annotations

import math
from html import escape

from octavo.serve.verify import LayerReport, Report
from octavo.serve.verify_report import Section, sections, verdict

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.verdict { padding: .6rem 1rem; border-left: .4rem solid; font-weight: 600; }
.right { border-color: #2a7f3f; background: #eef7f0; } .wrong { border-color: #b3261e; background: #fbeeed; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }
td { overflow-wrap: anywhere; } .remark { color: #555; max-width: 50rem; }
svg text { font: 11px system-ui, sans-serif; fill: #222; }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd; } th, td { border-color: #444; } .remark { color: #aaa; }
  .right { background: #16281b; } .wrong { background: #321715; } svg text { fill: #ddd; }
}
"""
_ROW, _LABEL, _BAR = 15, 330, 420  # pixels: a row's height, the width of names, and of the longest bar


def page(report: Report) -> str:
    """The page, from its doctype to its end."""
    state = "right" if report.ok else "wrong"
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>octavo verify: {escape(report.packed.name)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{escape(str(report.packed))}</h1>",
        f"<p>packed from {escape(str(report.against))}</p>",
        f'<p class="verdict {state}">{escape(verdict(report))}</p>',
        *(f'<p class="remark">{escape(remark)}</p>' for remark in report.remarks),
    ]
    for section in sections(report):
        parts.append(table(section))
        if section.title == "Layers":
            parts.append(bars(report.layers))
    return "\n".join([*parts, "</body>\n</html>\n"])


def table(section: Section) -> str:
    """One table, with its title and its remark."""
    head = "".join(f"<th>{escape(column)}</th>" for column in section.columns)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in section.rows)
    remark = f'<p class="remark">{escape(section.remark)}</p>' if section.remark else ""
    body = f'<div class="wide"><table>\n<tr>{head}</tr>\n{rows}\n</table></div>'
    return f"<h2>{escape(section.title)}</h2>\n{body}\n{remark}"


def bars(layers: list[LayerReport]) -> str:
    """The SQNR of each layer's weight and output as bars; nothing where nothing was measured."""
    values = [db for layer in layers for db in (layer.weight_sqnr, layer.output_sqnr) if _drawn(db)]
    if not values:
        return ""
    longest = max(10.0, *(db for db in values if db is not None))
    rows = [_bar_row(layer, at, longest) for at, layer in enumerate(layers)]
    height = _ROW * (len(layers) + 1)
    legend = (
        f'<rect x="{_LABEL}" y="2" width="10" height="5" fill="#3b6fb6"/><text x="{_LABEL + 14}" y="9">weight dB</text>'
        f'<rect x="{_LABEL + 90}" y="2" width="10" height="5" fill="#e08a2e"/>'
        f'<text x="{_LABEL + 104}" y="9">output dB</text>'
    )
    return (
        f'<div class="wide"><svg role="img" aria-label="SQNR by layer, in dB" width="{_LABEL + _BAR + 50}" '
        f'height="{height}" xmlns="http://www.w3.org/2000/svg">\n{legend}\n' + "\n".join(rows) + "\n</svg></div>"
    )


def _drawn(db: float | None) -> bool:
    return db is not None and math.isfinite(db)


def _bar_row(layer: LayerReport, at: int, longest: float) -> str:
    y = _ROW * (at + 1)
    parts = [f'<text x="{_LABEL - 8}" y="{y + 10}" text-anchor="end">{escape(layer.name)}</text>']
    for offset, db, colour in ((1, layer.weight_sqnr, "#3b6fb6"), (7, layer.output_sqnr, "#e08a2e")):
        if db is not None and math.isfinite(db):
            width = max(0.0, db) / longest * _BAR
            parts.append(
                f'<rect x="{_LABEL}" y="{y + offset}" width="{width:.1f}" height="5" fill="{colour}">'
                f"<title>{db:.2f} dB</title></rect>"
            )
    return "".join(parts)
