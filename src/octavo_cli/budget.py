"""What octavo pack says of a budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from octavo import serve

_ROWS = 10


def print_budget(console: Console, found: serve.Kept) -> None:
    """What was measured, what stays in BF16, and the groups that are harmed most for each byte that they save."""
    budget, of = found.budget, found.quality
    value, packed = budget.estimate(of), budget.estimate(found.all_packed)
    console.print(
        f"asked for {budget.show(budget.limit)}, measured {budget.show_estimate(value)} on {of.tokens} tokens of "
        f"{of.prompts} prompts; {budget.show(packed.value)} with every layer packed",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(_table(found))


def _table(found: serve.Kept) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("layers", found.harm.replace("_", " "), "MB saved", "stays in"):
        table.add_column(column, justify="left" if column in ("layers", "stays in") else "right", overflow="fold")
    shown = max(_ROWS, found.kept + 2)
    for i, group in enumerate(found.ranking[:shown]):
        place = "BF16" if i < found.kept else "eight bits"
        table.add_row(group.name, f"{group.harm:.3g}", f"{group.saved / 1e6:.3g}", place)
    if len(found.ranking) > shown:
        table.add_row(f"and {len(found.ranking) - shown} more", "", "", "eight bits")
    return table
