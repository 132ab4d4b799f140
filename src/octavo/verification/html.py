"""The report of `octavo verify` as one HTML page without scripts, other files, or network.

It can be read on a phone: a table wider than the page scrolls in its own box, and its words and numbers are not broken
across lines.
"""

import math
from html import escape

from octavo.verification.report import Invocation, Section, sections, verdict
from octavo.verification.result import LayerReport, Report

_STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --line: #ddd; --grey: #555; --weight: #3b6fb6;
  --output: #d9782d; --right: #2a7f3f; --wrong: #b3261e; --track: #eee; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --paper: #181818; --line: #444; --grey: #aaa;
  --weight: #7aa7e0; --output: #e9975a; --right: #5fbf78; --wrong: #f0766d; --track: #2a2a2a; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 1.5rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper); overflow-wrap: break-word; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.verdict { padding: .5rem 1rem; border-left: .4rem solid; font-weight: 600; }
.right { border-color: var(--right); } .wrong { border-color: var(--wrong); }
.remark, .run { color: var(--grey); max-width: 50rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { text-align: left; padding: .2rem 1.2rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  white-space: nowrap; }
td.text { white-space: normal; min-width: 16rem; }
.bars div { margin-top: .5rem; line-height: 1.25; } .bars p { margin: 0; display: flex; align-items: center; }
.bars span { background: var(--track); flex: 1; max-width: 40rem; } .bars i { display: block; height: .6rem; }
.bars b { font-weight: 400; width: 5.5rem; padding-left: .6rem; font-variant-numeric: tabular-nums; }
.weight { background: var(--weight); } .output { background: var(--output); }
.key { display: inline-block; width: .8rem; height: .6rem; }
"""
_LONG = 40  # a cell with more characters is text, and may be broken between words


def page(report: Report, invocation: Invocation) -> str:
    state = "right" if report.ok else "wrong"
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>octavo verify: {escape(report.packed.name)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
        f"<h1>{escape(str(report.packed))}</h1>",
        f"<p>{escape(report.architecture)} packed from {escape(str(report.against))}</p>",
        f'<p class="verdict {state}">{escape(verdict(report))}</p>',
        _findings(report),
        *(f'<p class="remark">{escape(remark)}</p>' for remark in report.remarks),
    ]
    for section in sections(report):
        parts.append(table(section))
        if section.title == "Layers":
            parts.append(bars(report.layers))
    return "\n".join([*parts, _footer(invocation), "</body>\n</html>\n"])


def _findings(report: Report) -> str:
    rows = [f"<li>{escape(finding.kind)} {escape(str(finding))}</li>" for finding in report.findings]
    return "<ul>\n" + "\n".join(rows) + "\n</ul>" if rows else ""


def _footer(invocation: Invocation) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in invocation.versions.items())
    return (
        f'<p class="run">{escape(invocation.date)}, {escape(versions)}</p>\n'
        f'<p class="run"><code>{escape(invocation.command)}</code></p>'
    )


def table(section: Section) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in section.columns)
    rows = "\n".join("<tr>" + "".join(_cell(text) for text in row) + "</tr>" for row in section.rows)
    remark = f'<p class="remark">{escape(section.remark)}</p>' if section.remark else ""
    body = f'<div class="wide"><table>\n<tr>{head}</tr>\n{rows}\n</table></div>'
    return f"<h2>{escape(section.title)}</h2>\n{body}\n{remark}"


def _cell(text: str) -> str:
    return f'<td class="text">{escape(text)}</td>' if len(text) > _LONG else f"<td>{escape(text)}</td>"


def bars(layers: list[LayerReport]) -> str:
    """The SQNR of each layer's weight and output as bars; "" if none was measured."""
    values = [db for layer in layers for _, db in _measured(layer)]
    if not values:
        return ""
    longest = 10 * math.ceil(max(10.0, *values) / 10)
    key = (
        '<p class="remark"><span class="key weight"></span> weight dB, <span class="key output"></span> output dB; '
        f"the whole width is {longest} dB</p>"
    )
    rows = [_bars_of(layer, longest) for layer in layers]
    return f'{key}\n<div class="bars">\n' + "\n".join(rows) + "\n</div>"


def _measured(layer: LayerReport) -> list[tuple[str, float]]:
    both = (("weight", layer.weight_sqnr), ("output", layer.output_sqnr))
    return [(kind, db) for kind, db in both if db is not None and math.isfinite(db)]


def _bars_of(layer: LayerReport, longest: float) -> str:
    parts = [f"<div>{escape(layer.name)}</div>"]
    for kind, db in _measured(layer):
        width = max(0.0, db) / longest
        parts.append(f'<p><span><i class="{kind}" style="width:{width:.1%}"></i></span><b>{db:.1f} dB</b></p>')
    return "".join(parts)
