"""The speeds and sizes that the project aims at: bench/aims.md, in which each aim is met or missed."""

import operator
import re
from collections.abc import Mapping
from typing import Any

from bench.report.filler import Result, fill_row

SIGNS = {"≥": operator.ge, "≤": operator.le, "<": operator.lt}
BOUND = re.compile(r"(≥|≤|<) ([\d.]+)")
COPY_ELEMENTS = 8192 * 4096  # a kernel on fewer elements has no aim


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


def least_share(kernels: list[Result]) -> float:
    """The least share of a copy's bandwidth, of kernels on large tensors."""
    return min(float(row["share"]) for row in kernels if row["shape"][0] * row["shape"][1] >= COPY_ELEMENTS)


def fastest(run: Result, *words: str) -> float:
    """The best ratio to BF16 of the modes with all of these words in their names."""
    modes = [row for row in run["modes"] if "ratio" in row and all(word in row["mode"] for word in words)]
    return max(float(row["ratio"]) for row in modes)
