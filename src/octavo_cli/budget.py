"""The report of a budget by octavo pack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo_cli.display import print_table, say

if TYPE_CHECKING:
    from octavo.packing import BudgetReport

_ROWS = 10


def print_budget(found: BudgetReport) -> None:
    """Print the measured quality, the layers that stay in BF16, and the groups with the most harm per byte saved."""
    from octavo.words import plural

    of = found.quality
    for budget in found.budgets:
        value, packed = budget.estimate(of), budget.estimate(found.all_packed)
        say(
            f"asked for {budget.show(budget.limit)}, measured {budget.show_estimate(value)} on "
            f"{plural(of.tokens, 'token')} of {plural(of.prompts, 'prompt')}; "
            f"{budget.show(packed.value)} with every layer packed"
        )
    _print_ranking(found)


def _print_ranking(found: BudgetReport) -> None:
    shown = max(_ROWS, found.kept + 2)
    rows = [
        (group.name, f"{group.harm:.3g}", f"{group.saved / 1e6:.3g}", "BF16" if i < found.kept else "eight bits")
        for i, group in enumerate(found.ranking[:shown])
    ]
    if len(found.ranking) > shown:
        rows.append((f"and {len(found.ranking) - shown} more", "", "", "eight bits"))
    harm = found.harm.replace("_", " ")
    print_table(("layers", harm, "MB saved", "stays in"), rows, right=(harm, "MB saved"))
