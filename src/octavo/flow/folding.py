"""Folding the operations of repeated modules into one row."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from octavo.flow.operation import Operation


@dataclass(frozen=True)
class Row:
    """Equal operations of repeated modules.

    Args:
        operation: one of them, its module's name and those of its parameters with * for the indices.
        count: how many there are.
        flops: of all of them.
    """

    operation: Operation
    count: int
    flops: int


def patterns_of(model: nn.Module) -> dict[str, str]:
    """The name of every module, with * for the index in a list of modules of one class: "layers.*.mlp"."""
    patterns = {"": ""}
    for name, parent in model.named_modules(remove_duplicate=False):
        children = dict(parent.named_children())
        repeated = len(children) > 1 and len({type(child) for child in children.values()}) == 1
        for child in children:
            below = "*" if repeated and child.isdigit() else child
            patterns[f"{name}.{child}".lstrip(".")] = f"{patterns[name]}.{below}".lstrip(".")
    return patterns


def fold(operations: Iterable[Operation], patterns: Mapping[str, str]) -> list[Row]:
    """The rows of `operations`, in the order of each row's first operation.

    Args:
        operations: of a model.
        patterns: of its modules, by `patterns_of`.
    """
    rows: dict[Operation, tuple[int, int]] = {}
    for each in operations:
        owners = [name.rpartition(".") for name in each.parameters]
        parameters = tuple(f"{patterns[owner]}{dot}{leaf}" for owner, dot, leaf in owners)
        key = replace(each, module=patterns[each.module], parameters=parameters, flops=0)
        count, flops = rows.get(key, (0, 0))
        rows[key] = count + 1, flops + each.flops
    return [Row(key, count, flops) for key, (count, flops) in rows.items()]
