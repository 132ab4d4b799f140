"""The report of a trace: the operations, totals, and tables in which repeated modules are one row."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from octavo.flow.folding import Row, fold, patterns_of
from octavo.flow.left_out import LeftOut, NeverCalled, find_left_out, find_never_called
from octavo.flow.operation import PHASES, Operation
from octavo.flow.recorder import Recorder
from octavo.flow.tables import Table, as_text, fp32_table, left_out_table, module_table, operation_table, totals_table
from octavo.tracing.arithmetic import NAMES


@dataclass(frozen=True)
class DtypeFlow:
    """The dtypes of a forward and backward pass; printed, it is a set of tables.

    Args:
        model: the class of the model.
        autocast: "BF16", "FP16", or "off".
        operations: in the order in which they ran. Views, and operations without floating tensors, are left out.
        left_out: products that do not run in FP8, the largest share of the FLOPs first.
        never_called: modules whose `forward` does not run.
        patterns: the name of each module, with * for the index in a list of modules of one class.
        notes: what differs between the trace and a run.
    """

    model: str
    autocast: str
    operations: tuple[Operation, ...]
    left_out: tuple[LeftOut, ...]
    never_called: tuple[NeverCalled, ...]
    patterns: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def flops(self) -> dict[str, dict[str, int]]:
        """FLOPs of products, convolutions and attention: phase -> dtype -> FLOPs."""
        found: dict[str, dict[str, int]] = {}
        for each in self.operations:
            if each.flops:
                phase = found.setdefault(each.phase, {})
                phase[each.computes_in] = phase.get(each.computes_in, 0) + each.flops
        return {phase: found[phase] for phase in PHASES if phase in found}

    @property
    def rows(self) -> list[Row]:
        """The operations, equal ones of repeated modules in one row."""
        return fold(self.operations, self.patterns)

    def select(self, glob: str) -> "DtypeFlow":
        """The report of the modules whose name matches `glob`, such as "layers.0.*".

        Raises:
            ValueError: no module with an operation matches.
        """
        chosen = tuple(each for each in self.operations if fnmatchcase(each.module, glob))
        if not chosen:
            names = list(dict.fromkeys(each.module for each in self.operations if each.module))
            raise ValueError(
                f"{glob!r} matches no module that runs an operation; there are {', '.join(names[:8])}"
                + (", ..." if len(names) > 8 else "")
            )
        return replace(self, operations=chosen)

    def tables(self) -> list[Table]:
        """Totals, modules, the operations in FP32, and the products outside of FP8."""
        rows = self.rows
        return [totals_table(self.flops), module_table(rows), fp32_table(rows), left_out_table(self.left_out)]

    def operation_table(self) -> Table:
        """One row for each operation of each module, repeated modules folded."""
        return operation_table(self.rows)

    def remarks(self) -> list[str]:
        """Sentences on modules that are never called, and on what differs between the trace and a run."""
        said = []
        for each in self.never_called:
            of = f"{each.module} ({each.what}{f', {each.count} times' if each.count > 1 else ''})"
            how = "another module reads its parameters directly" if each.read else "no operation reads its parameters"
            said.append(f"{of} is never called: {how}")
        return [*said, *self.notes]

    def to_dict(self) -> dict[str, Any]:
        """JSON values: totals, the rows, the products outside of FP8 and the remarks."""
        return {
            "model": self.model,
            "autocast": self.autocast,
            "flops": self.flops,
            "operations": [_row(row) for row in self.rows],
            "left_out": [asdict(each) for each in self.left_out],
            "never_called": [asdict(each) for each in self.never_called],
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        tables = [as_text(table) for table in self.tables() if table.rows]
        return "\n\n".join([f"{self.model}, autocast {self.autocast}", *tables, *self.remarks()])


def make_report(model: nn.Module, recorder: Recorder, autocast: torch.dtype | None) -> DtypeFlow:
    """The report of the operations that `recorder` saw."""
    operations = tuple(recorder.operations)
    return DtypeFlow(
        type(model).__name__,
        "off" if autocast is None else NAMES[autocast],
        operations,
        find_left_out(model, operations),
        find_never_called(model, recorder.called, operations),
        patterns_of(model),
        _notes(model, autocast, any(each.phase == "backward" for each in operations)),
    )


def _notes(model: nn.Module, autocast: torch.dtype | None, backward: bool) -> tuple[str, ...]:
    fast = [name for name, m in model.named_modules() if type(m) is nn.TransformerEncoderLayer and not m.training]
    if backward or autocast is not None or not fast:
        return ()
    return (
        f"in evaluation mode without autocast and gradients, PyTorch runs {fast[0]} ({len(fast)} such) on a fast path, "
        "one operation that never calls its layers; the trace shows the layers. octavo.convert leaves the fast path",
    )


def _row(row: Row) -> dict[str, Any]:
    return asdict(row.operation) | {"count": row.count, "flops": row.flops}
