"""What octavo pack says of a budget."""

from __future__ import annotations

from rich.table import Table

from octavo import serve

_ROWS = 10


def budget_table(found: serve.Kept) -> Table:
    """What was measured, what stays in BF16, and the groups that are harmed most for each byte that they save."""
    budget, of = found.budget, found.quality
    value, packed = budget.estimate(of), budget.estimate(found.all_packed)
    interval = "" if value.low is None or value.high is None else f", {value.low:.3g} to {value.high:.3g}"
    table = Table(
        box=None, pad_edge=False, title_justify="left",
        title=f"asked for {budget.show(budget.limit)}: measured {budget.show(value.value)}{interval} on {of.tokens} "
        f"tokens of {of.prompts} prompts; {budget.show(packed.value)} with every layer packed",
    )  # fmt: skip
    for column in ("layers", "kl alone", "MB saved", "stays in"):
        table.add_column(column, justify="left" if column in ("layers", "stays in") else "right", overflow="fold")
    shown = max(_ROWS, found.kept + 2)
    for i, group in enumerate(found.ranking[:shown]):
        place = "BF16" if i < found.kept else "eight bits"
        table.add_row(group.name, f"{group.harm:.3g}", f"{group.saved / 1e6:.3g}", place)
    if len(found.ranking) > shown:
        table.add_row(f"and {len(found.ranking) - shown} more", "", "", "eight bits")
    return table
