"""Pages of results: Markdown templates whose fields and tables are filled from bench/results.

Text in braces is an expression of Python with a format, as in an f-string: `{gpu_stack.kept.ratio:.3f}`. Each file of
bench/results is a name, and so are the functions of the page's modules. A key may be an attribute.

A table stands in its template with one row of cells, which is repeated for each row of the results:

    <!-- each gpu_stack.modes -->
    | mode | ms | vs BF16 |
    | --- | --- | --- |
    | {mode} | {median:.2f} | {ratio:.3f}x |

The keys of a row are names in its cells. A cell with a value that is None or not there is a dash. A heading in braces
makes a column of each of its values, and the rows whose other cells are equal are one row. A line of text, such as one
of a list, is repeated in the same way.

What stands between `<!-- if failures(results) -->` and `<!-- end -->` is left out where the expression is false.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import log
from pathlib import Path
from statistics import median
from string import Formatter
from types import ModuleType
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
MISSING = "–"
IF = re.compile(r"<!-- if (.+?) -->\n(.*?)<!-- end -->\n", re.DOTALL)
LINE = re.compile(r"<!-- each (.+?) -->\n([^|\n].*)")
EACH = re.compile(r"<!-- each (.+?) -->\n\|(.*)\|\n\|.*\|\n\|(.*)\|")

Result = dict[str, Any]
Row = Mapping[str, Any]
Rows = Iterator[Row]


class Fields(dict[str, Any]):
    """A dictionary whose keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def load() -> dict[str, Result]:
    """Every file of bench/results, by its name without the suffix."""
    return {path.stem: json.loads(path.read_text(), object_hook=Fields) for path in sorted(RESULTS.glob("*.json"))}


def fill(template: str, names: Mapping[str, Any]) -> str:
    """`template` with its tables and then its fields filled."""
    page = IF.sub(lambda found: found[2] if eval(found[1], dict(names)) else "", template)
    page = EACH.sub(lambda found: _escaped(_table(found, names)), page)
    page = LINE.sub(lambda found: _escaped(_lines(found, names)), page)
    return re.sub(r"\n{3,}", "\n\n", _filled(page, names))  # a warning that says nothing leaves an empty paragraph


def markdown(rows: Iterable[Mapping[str, str]], heads: Sequence[str] = ()) -> str:
    """A table of rows of text, with these headings; by default those of the first row."""
    rows = list(rows)
    heads = heads or list(rows[0])
    lines = [heads, ["---"] * len(heads), *([row.get(head, MISSING) for head in heads] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fill_row(line: str, names: Mapping[str, Any]) -> str:
    """A row of a table in Markdown with its cells filled; a dash where a figure was not measured."""
    return " | ".join(_cell(part, names) for part in line.split(" | "))


def _table(template: re.Match[str], names: Mapping[str, Any]) -> str:
    each, heads, cells = template.groups()
    columns = list(zip(*([part.strip() for part in line.split(" | ")] for line in (heads, cells)), strict=True))
    found: dict[str, dict[str, None]] = {head: {} for head, _ in columns}  # the headings that each one has become
    rows: dict[Any, dict[str, str]] = {}
    for count, row in enumerate(eval(each, dict(names))):
        values, texts = {**names, **row}, {}
        for head, cell in columns:
            made = _filled(head, values)
            found[head][made] = None
            texts[made] = _cell(cell, values)
        fixed = tuple(texts[head] for head, _ in columns if "{" not in head)
        rows.setdefault(fixed if len(fixed) < len(columns) else count, {}).update(texts)
    for head, columns_made in found.items():
        if all(row.get(column, MISSING) == MISSING for row in rows.values() for column in columns_made):
            raise ValueError(f"the column {head!r} of the table of {each} is empty: correct its expression")
    return markdown(rows.values(), [column for columns_made in found.values() for column in columns_made])


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _lines(template: re.Match[str], names: Mapping[str, Any]) -> str:
    return "\n".join(_filled(template[2], {**names, **row}) for row in eval(template[1], dict(names)))


def _cell(text: str, names: Mapping[str, Any]) -> str:
    try:
        return _filled(text, names)
    except (AttributeError, KeyError, NameError, TypeError):  # not measured
        return MISSING


def _filled(text: str, names: Mapping[str, Any]) -> str:
    parts = []
    for literal, field, form, _ in Formatter().parse(text):
        parts.append(literal)
        if field is not None:
            value = eval(field, dict(names))
            if value is None:
                raise TypeError(f"{field} was not measured")
            parts.append(format(value, form or ""))
    return "".join(parts)


# --- What templates call ---------------------------------------------------------------------------------------


def spread(rows: Iterable[Row], key: str) -> list[Fields]:
    """A row for each entry of the dictionary row[key], with the names `name` and `value`."""
    return [Fields({**row, "name": name, "value": value}) for row in rows for name, value in row[key].items()]


def group(rows: Iterable[Row], by: str, into: str) -> list[Fields]:
    """One row for each value of `by`, in which each row lies by its value of `into`."""
    found: dict[Any, Fields] = {}
    for row in rows:
        found.setdefault(row[by], Fields({by: row[by]}))[row[into]] = row
    return list(found.values())


def span(interval: Iterable[float] | None, form: str) -> str:
    """The ends of an interval."""
    return " to ".join(format(end, form) for end in interval) if interval else f"{MISSING} (one seed)"


def joined(values: Iterable[Any], form: str = "", by: str = ", ") -> str:
    return by.join(format(value, form) for value in values) or MISSING


def number(value: float | None, form: str = "{:.2f}x") -> str:
    return MISSING if value is None else form.format(value)


def machine(result: Result) -> str:
    """One line that says where, with what and when a result was measured."""
    facts, threads = result["machine"], "{} thread" if result["machine"].get("threads") == 1 else "{} threads"
    forms = {"gpu": "{}", "processor": "{}", "threads": threads, "torch": "torch {}", "triton": "Triton {}"}
    forms |= {"torchao": "torchao {}", "transformers": "transformers {}", "python": "Python {}"}
    forms |= {"commit": "commit {}", "measured": "{}"}
    return ", ".join(form.format(facts[key]) for key, form in forms.items() if facts.get(key)) + "."


HELPERS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (spread, group, span, joined, machine, median, log)}


def names_of(results: dict[str, Result], *modules: ModuleType) -> dict[str, Any]:
    """The names that a template may use: those of the modules, of the functions above and of the results."""
    functions = {key: value for module in modules for key, value in vars(module).items()}
    return {**functions, **HELPERS, **results, "results": results}
