"""Markdown tables of result rows. A row is a dictionary from heading to text; a table has the headings of its rows."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
MISSING = "–"

Result = dict[str, Any]
Row = Mapping[str, str]


def load() -> dict[str, Result]:
    """Every file of bench/results, by its name without the suffix."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def markdown(rows: Iterable[Row]) -> str:
    """A table in Markdown. Its headings are those of all rows, in the order of their first appearance."""
    rows = list(rows)
    if not rows:
        return "Not measured."
    heads = list(dict.fromkeys(head for row in rows for head in row))
    lines = [heads, ["---"] * len(heads), *([row.get(head, MISSING) for head in heads] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def pivot(corner: str, cells: Iterable[tuple[str, str, str]]) -> list[Row]:
    """Rows of (row, column, text) cells; `corner` is the heading of the first column."""
    rows: dict[str, dict[str, str]] = {}
    for name, column, text in cells:
        rows.setdefault(name, {corner: name})[column] = text
    return list(rows.values())


def details(summary: str, body: str) -> str:
    """A part of a page that is folded until the reader opens it."""
    return f"<details>\n<summary>{summary}</summary>\n\n{body}\n\n</details>"


def number(value: float | None, form: str) -> str:
    return MISSING if value is None else form.format(value)


def ratio(above: float | None, below: float | None) -> float | None:
    """`above` / `below`; None where either was not measured."""
    return None if above is None or below is None else above / below


def times(above: float | None, below: float | None) -> str:
    return number(ratio(above, below), "{:.3f}x")


def timing(row: Result) -> dict[str, str]:
    return {"ms": f"{row['median']:.2f}", "quartiles": f"{row['low']:.2f} to {row['high']:.2f}"}


def earlier(row: Result) -> dict[str, str]:
    """The commit of a row that has a machine of its own (`record.rows_before`), for a column of its table."""
    return {"measured before, at commit": row["machine"]["commit"]} if "machine" in row else {}


def machine(result: Result) -> str:
    """One line that says where, with what and when a result was measured."""
    forms = {"gpu": "{}", "processor": "{}", "threads": "{} threads", "torch": "torch {}", "triton": "Triton {}"}
    forms |= {
        "torchao": "torchao {}",
        "transformers": "transformers {}",
        "python": "Python {}",
        "commit": "commit {}",
        "measured": "{}",
    }
    facts = result["machine"]
    forms["threads"] = "{} thread" if facts.get("threads") == 1 else forms["threads"]
    return ", ".join(form.format(facts[key]) for key, form in forms.items() if facts.get(key)) + "."
