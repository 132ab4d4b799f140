"""The speeds and sizes that the project aims at: bench/aims.md, in which each aim is met or missed."""

import operator
import re
from collections.abc import Mapping
from typing import Any

from bench.report.filler import fill_row

SIGNS = {"≥": operator.ge, "≤": operator.le, "<": operator.lt}
BOUND = re.compile(r"(≥|≤|<) ([\d.]+)")


def judged(template: str, names: Mapping[str, Any]) -> str:
    """`template` with its rows, `| claim | sign bound | figure |`, filled and followed by a verdict."""
    lines = []
    for line in template.splitlines():
        if found := BOUND.search(line):
            line = fill_row(line, names)
            figure = re.search(r"-?[\d.]+", line.split(" | ")[2])
            line += f" {verdict(float(figure[0]), *found.groups()) if figure else 'not measured'} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def verdict(value: float, sign: str, bound: str) -> str:
    return "met" if SIGNS[sign](value, float(bound)) else "**missed**"
