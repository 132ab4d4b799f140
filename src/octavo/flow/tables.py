"""The tables of a report of dtypes, as rows of text."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from octavo.flow.folding import Row
from octavo.flow.left_out import LeftOut
from octavo.flow.operation import PHASES
from octavo.tracing.arithmetic import WIDTHS
from octavo.words import plural, some_of

_SILENT = ("cast", "copy")  # kinds without arithmetic


class Table(NamedTuple):
    """A table; columns in `right` hold numbers, those in `prose` sentences."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    right: tuple[str, ...] = ()
    prose: tuple[str, ...] = ()


def totals_table(flops: Mapping[str, Mapping[str, int]]) -> Table:
    """The share of the FLOPs by phase and dtype."""
    dtypes = [name for name in WIDTHS if any(name in each for each in flops.values())]
    total = sum(sum(each.values()) for each in flops.values()) or 1
    rows = [
        (phase, f"{sum(each.values()):.3g}", *(_percent(each.get(name, 0) / total) for name in dtypes))
        for phase, each in flops.items()
    ]
    if len(rows) > 1:
        sums = [sum(each.get(name, 0) for each in flops.values()) / total for name in dtypes]
        rows.append(("all", f"{total:.3g}", *map(_percent, sums)))
    return Table("FLOPs by dtype", ("phase", "FLOPs", *dtypes), rows, ("FLOPs", *dtypes))


def module_table(rows: Sequence[Row]) -> Table:
    """One row for each module: the operations of each phase by dtype, and the share of the FLOPs."""
    total = sum(row.flops for row in rows) or 1
    phases = [p for p in PHASES if any(row.operation.phase == p for row in rows)]
    modules = list(dict.fromkeys(row.operation.module for row in rows))
    found = []
    for module in modules:
        own = [row for row in rows if row.operation.module == module]
        share = sum(row.flops for row in own) / total
        cells = [_by_dtype([row for row in own if row.operation.phase == phase]) for phase in phases]
        found.append((module or "(model)", _percent(share) if share else "", *cells))
    return Table("modules", ("module", "FLOPs", *phases), found, ("FLOPs",), tuple(phases))


def fp32_table(rows: Sequence[Row]) -> Table:
    """The operations of the forward pass that compute in FP32, by reason: where, and why."""
    groups: dict[str, tuple[list[str], list[str]]] = {}
    for row in rows:
        each = row.operation
        if each.phase == "forward" and each.computes_in == "FP32" and each.kind not in ("cast",):
            names, modules = groups.setdefault(each.reason, ([], []))
            names.append(each.name)
            modules.append(each.module or "(model)")
    found = [
        (" ".join(dict.fromkeys(names)), some_of(list(dict.fromkeys(modules))), reason)
        for reason, (names, modules) in groups.items()
    ]
    return Table("FP32 in the forward pass, and why", ("operations", "modules", "why"), found, (), ("modules", "why"))


def left_out_table(left_out: Sequence[LeftOut]) -> Table:
    """The products that do not run in FP8."""
    rows = [
        (each.module or "(model)", str(each.count), each.what, each.dtype, _percent(each.share), each.reason)
        for each in left_out
    ]
    columns = ("module", "count", "what", "dtype", "FLOPs", "why")
    return Table("products that do not run in FP8", columns, rows, ("count", "FLOPs"), ("why",))


def operation_table(rows: Sequence[Row]) -> Table:
    """One row for each operation of each module."""
    found = []
    for row in rows:
        each = row.operation
        flow = f"{'+'.join(each.inputs) or '-'} -> {'+'.join(each.outputs) or '-'}"
        flops = f"{row.flops:.3g}" if row.flops else ""
        name = each.module or "(model)"
        found.append((each.phase, name, each.name, str(row.count), flow, each.adds_in, flops, each.reason))
    columns = ("phase", "module", "operation", "count", "dtypes", "sums in", "FLOPs", "why")
    return Table("operations", columns, found, ("count", "FLOPs"), ("why",))


def as_text(table: Table) -> str:
    """The table with columns aligned by blanks."""
    widths = [max(len(row[at]) for row in [table.columns, *table.rows]) for at in range(len(table.columns))]
    lines = [
        "  ".join(
            cell.rjust(width) if name in table.right else cell.ljust(width)
            for name, cell, width in zip(table.columns, row, widths, strict=True)
        ).rstrip()
        for row in [table.columns, *table.rows]
    ]
    return "\n".join([table.title, *lines])


def _by_dtype(rows: Sequence[Row]) -> str:
    """The operations with arithmetic by dtype, and the number of casts: "BF16 mm, FP32 mean mul, 2 casts"."""
    parts = []
    for dtype in reversed(WIDTHS):
        names = [r.operation.name for r in rows if r.operation.computes_in == dtype and r.operation.kind not in _SILENT]
        if names:
            parts.append(f"{dtype} {' '.join(dict.fromkeys(names))}")
    casts = sum(1 for row in rows if row.operation.kind == "cast")
    if casts:
        parts.append(plural(casts, "cast"))
    return ", ".join(parts)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
