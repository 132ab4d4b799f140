"""octavo inspect --dtypes: the dtypes of a step of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo_cli.display import print_table, say

if TYPE_CHECKING:
    from octavo.flow.tables import Table


def print_dtypes(source: Path, module: str | None, changes: dict[str, Any], *, as_json: bool) -> None:
    """Trace a step of training of the model `source`, and print its tables.

    Args:
        source: as `octavo.train.model_flow.trace_source` takes it.
        module: a glob of modules, whose operations are printed one by one; None prints the modules of the whole model.
        changes: other values of settings.
        as_json: print JSON instead.
    """
    from octavo.train.model_flow import trace_source

    flow = trace_source(source, changes)
    if module is not None:
        flow = flow.select(module)
    if as_json:
        print(json.dumps(flow.to_dict(), indent=2))
        return
    say(f"{flow.model} of {source}: a forward and backward pass, autocast {flow.autocast}")
    for table in [flow.operation_table()] if module is not None else flow.tables():
        if table.rows:
            say()
            _print(table)
    for remark in flow.remarks():
        say(remark)


def _print(table: Table) -> None:
    print_table(table.columns, table.rows, right=table.right, prose=table.prose, title=table.title)
