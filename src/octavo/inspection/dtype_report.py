"""The report of a model's dtypes: traced, grouped by pattern, and shown as tables."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from octavo.nn.attention_layers import is_convertible
from octavo.nn.conversion import find_experts
from octavo.nn.linear import RecipeLayer, is_gemm
from octavo.nn.module_tools import check_initialized, check_module
from octavo.nn.selection import select_linears
from octavo.tracing import NAMES, PHASES, WIDTHS, Operation, Tracer
from octavo.util import Table, percent, plural, some_of

# ---- Folding the operations of repeated modules into one.


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


def fold(operations: Iterable[Operation], patterns: Mapping[str, str]) -> list[Operation]:
    """Equal operations of repeated modules as one, with their `count`, the FLOPs of all, and * for the indices of its
    module and parameters, in the order of the first of each. `patterns`: `patterns_of` the model."""
    rows: dict[Operation, tuple[int, int]] = {}
    for each in operations:
        owners = [name.rpartition(".") for name in each.parameters]
        parameters = tuple(f"{patterns[owner]}{dot}{leaf}" for owner, dot, leaf in owners)
        key = replace(each, module=patterns[each.module], parameters=parameters, flops=0, weight=(), rows=0)
        count, flops = rows.get(key, (0, 0))
        rows[key] = count + 1, flops + each.flops
    return [replace(key, count=count, flops=flops) for key, (count, flops) in rows.items()]


# ---- The products that do not run in FP8, each with its share of the FLOPs, and the modules that a pass never calls.


_NOT_CONVERTED = "not converted: octavo.convert(model) would run it in FP8"


@dataclass(frozen=True)
class LeftOut:
    """Products, convolutions or attention that run in another dtype than FP8; repeated modules are one entry."""

    module: str  # with * for the indices of repeated modules
    count: int  # of modules
    what: str  # such as "linear layer" or "convolution"
    dtype: str  # that it computes in
    share: float  # of the FLOPs of the pass, 0 to 1
    reason: str  # why `octavo.convert` leaves it, or that it would convert it


def find_left_out(model: nn.Module, operations: Sequence[Operation], patterns: dict[str, str]) -> tuple[LeftOut, ...]:
    """The products of `operations` that do not run in FP8, the largest share first."""
    modules, reasons = dict(model.named_modules()), dict[str, str]()
    with suppress(ValueError):  # no layer can be converted
        reasons = {layer.name: layer.reason for layer in select_linears(model)}
    dimensions = {name: p.ndim for name, p in model.named_parameters()}
    total = sum(each.flops for each in operations) or 1
    groups: defaultdict[tuple[str, str, str, str], list[Operation]] = defaultdict(list)
    for each in operations:
        if each.flops and each.computes_in != "FP8":
            stacked = any(dimensions[name] > 2 for name in each.parameters)
            what, reason = _explain(each, modules[each.module], reasons.get(each.module, ""), stacked=stacked)
            groups[patterns[each.module], what, each.computes_in, reason].append(each)
    found = []
    for (pattern, what, dtype, reason), group in groups.items():
        count, share = len({each.module for each in group}), sum(each.flops for each in group) / total
        found.append(LeftOut(pattern, count, what, dtype, share, reason))
    return tuple(sorted(found, key=lambda each: -each.share))


def find_never_called(
    model: nn.Module, called: set[str], operations: Sequence[Operation], patterns: Mapping[str, str]
) -> tuple[str, ...]:
    """Sentences on the modules with parameters of their own that are not in `called`: hooks and conversion have no
    effect there."""
    read = {name.rpartition(".")[0] for each in operations for name in each.parameters}
    groups = Counter[tuple[str, str, bool]]()
    for name, module in model.named_modules():
        if name not in called and next(module.parameters(recurse=False), None) is not None:
            groups[patterns[name], type(module).__name__, name in read] += 1
    how = {True: "another module reads its parameters directly", False: "no operation reads its parameters"}
    return tuple(
        f"{pattern} ({what}{f', {count} times' if count > 1 else ''}) is never called: {how[used]}"
        for (pattern, what, used), count in groups.items()
    )


def _explain(operation: Operation, owner: nn.Module, skipped: str, *, stacked: bool) -> tuple[str, str]:
    if operation.kind == "attention":
        return "attention", "it multiplies activations: convert leaves attention alone"
    if isinstance(owner, RecipeLayer):
        if owner.recipe.quantized:
            return "linear layer", f"the recipe {owner.recipe.name} computes it in the autocast dtype"
        return "linear layer", "the recipe bf16 quantizes nothing"
    if operation.kind == "convolution":
        return "convolution", _NOT_CONVERTED if is_gemm(owner) else "its windows overlap, or it has groups: no product"
    if isinstance(owner, nn.Linear):
        return "linear layer", skipped or _NOT_CONVERTED
    if isinstance(owner, nn.MultiheadAttention) and operation.parameters:
        return "packed attention projection", _NOT_CONVERTED if is_convertible(owner) else "it has keys of its own"
    if stacked and find_experts(owner):
        return "experts", _NOT_CONVERTED
    if stacked:
        return "3-D weight", "a stack of matrices in one parameter: convert takes linear layers, and experts it knows"
    if operation.parameters:
        return f"matrix of {type(owner).__name__}", "the module multiplies it itself: convert takes linear layers"
    return "product of activations", "no weight takes part: convert leaves it alone"


# ---- The report of a trace: the operations, totals, and tables in which repeated modules are one row.


def totals_table(flops: Mapping[str, Mapping[str, int]]) -> Table:
    """The share of the FLOPs by phase and dtype."""
    dtypes = [name for name in WIDTHS if any(name in each for each in flops.values())]
    total = sum(sum(each.values()) for each in flops.values()) or 1
    rows = [
        (phase, f"{sum(each.values()):.3g}", *(percent(each.get(name, 0) / total) for name in dtypes))
        for phase, each in flops.items()
    ]
    if len(rows) > 1:
        sums = [sum(each.get(name, 0) for each in flops.values()) / total for name in dtypes]
        rows.append(("all", f"{total:.3g}", *map(percent, sums)))
    return Table("FLOPs by dtype", ("phase", "FLOPs", *dtypes), rows, ("FLOPs", *dtypes))


def module_table(rows: Sequence[Operation]) -> Table:
    """One row for each module: the operations of each phase by dtype, and the share of the FLOPs."""
    total = sum(row.flops for row in rows) or 1
    phases = [phase for phase in PHASES if any(row.phase == phase for row in rows)]
    found = []
    for module in dict.fromkeys(row.module for row in rows):
        own = [row for row in rows if row.module == module]
        share = sum(row.flops for row in own) / total
        cells = [_by_dtype([row for row in own if row.phase == phase]) for phase in phases]
        found.append((module or "(model)", percent(share) if share else "", *cells))
    return Table("modules", ("module", "FLOPs", *phases), found, ("FLOPs",), tuple(phases))


def fp32_table(rows: Sequence[Operation]) -> Table:
    """The operations of the forward pass that compute in FP32, by reason: where, and why."""
    groups: dict[str, tuple[list[str], list[str]]] = {}
    for each in rows:
        if each.phase == "forward" and each.computes_in == "FP32" and each.kind != "cast":
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
        (each.module or "(model)", str(each.count), each.what, each.dtype, percent(each.share), each.reason)
        for each in left_out
    ]
    columns = ("module", "count", "what", "dtype", "FLOPs", "why")
    return Table("products that do not run in FP8", columns, rows, ("count", "FLOPs"), ("why",))


def _by_dtype(operations: Sequence[Operation]) -> str:
    """The operations with arithmetic by dtype, and the number of casts: "BF16 mm, FP32 mean mul, 2 casts"."""
    parts, computing = [], [each for each in operations if each.kind not in ("cast", "copy")]
    for dtype in reversed(WIDTHS):
        if names := [each.name for each in computing if each.computes_in == dtype]:
            parts.append(f"{dtype} {' '.join(dict.fromkeys(names))}")
    if casts := sum(each.kind == "cast" for each in operations):
        parts.append(plural(casts, "cast"))
    return ", ".join(parts)


@dataclass(frozen=True)
class DtypeFlow:
    """The dtypes of a forward and backward pass; printed, it is a set of tables."""

    model: str  # its class
    autocast: str  # "BF16", "FP16", or "off"
    operations: tuple[Operation, ...]  # as they ran, without views and operations on no floating tensor
    left_out: tuple[LeftOut, ...]  # products that do not run in FP8, the largest share of the FLOPs first
    remarks: tuple[str, ...]  # on modules whose `forward` does not run
    patterns: Mapping[str, str]  # the name of each module, with * for the index in a list of modules of one class

    @property
    def flops(self) -> dict[str, dict[str, int]]:
        """FLOPs of products, convolutions and attention: phase -> dtype -> FLOPs."""
        found = {phase: Counter[str]() for phase in PHASES}
        for each in self.operations:
            if each.flops:
                found[each.phase][each.computes_in] += each.flops
        return {phase: dict(flops) for phase, flops in found.items() if flops}

    @property
    def rows(self) -> list[Operation]:
        """The operations, equal ones of repeated modules as one (`fold`)."""
        return fold(self.operations, self.patterns)

    def select(self, glob: str) -> "DtypeFlow":
        """The report of the modules whose name matches `glob`, such as "layers.0.*". A ValueError if none does."""
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
        found = []
        for each in self.rows:
            flow = f"{'+'.join(each.inputs) or '-'} -> {'+'.join(each.outputs) or '-'}"
            flops = f"{each.flops:.3g}" if each.flops else ""
            name = each.module or "(model)"
            found.append((each.phase, name, each.name, str(each.count), flow, each.adds_in, flops, each.reason))
        columns = ("phase", "module", "operation", "count", "dtypes", "sums in", "FLOPs", "why")
        return Table("operations", columns, found, ("count", "FLOPs"), ("why",))

    def to_dict(self) -> dict[str, Any]:
        """JSON values: totals, the rows, the products outside of FP8 and the remarks."""
        rows = list(map(asdict, self.rows))
        return {
            "model": self.model,
            "autocast": self.autocast,
            "flops": self.flops,
            "operations": [{key: row[key] for key in row if key not in ("weight", "rows")} for row in rows],
            "left_out": [asdict(each) for each in self.left_out],
            "remarks": list(self.remarks),
        }

    def __repr__(self) -> str:
        tables = [str(table) for table in self.tables() if table.rows]
        return "\n\n".join([f"{self.model}, autocast {self.autocast}", *tables, *self.remarks])


# ---- Tracing a model: one forward and backward pass on fake tensors, under the autocast of a GPU.


def dtype_flow(
    model: nn.Module,
    *inputs: Any,
    autocast: torch.dtype | None = torch.bfloat16,
    loss: Callable[[Any], Tensor] | None = None,
    **keywords: Any,
) -> DtypeFlow:
    """Show in which dtypes the operations of a model run in a forward and backward pass, and why.

    The pass runs on fake tensors, without memory or arithmetic, so the model may be of any size, on any device, the
    meta device included; it stays as it is. Autocast casts by its lists for GPUs, also where there is none. The kernels
    that PyTorch chooses are those for a CPU: attention has another name on a GPU, and softmax, which is given
    dtype=float32 there, shows a cast.

    Args:
        model: of any library, converted by `octavo.convert` or not, in training or evaluation mode.
        *inputs, **keywords: of its forward pass; tensors on any device. Values of tensors are not known in the pass.
        autocast: `torch.bfloat16` or `torch.float16`; None runs without autocast.
        loss: makes a scalar from the output of the model. By default the gradients start at the output, or at
            `output.loss` where the model computes that.

    Returns:
        The operations, with totals and tables; `print` it.

    Raises:
        TypeError: `model` is not a module.
        ValueError: another dtype for autocast, a sharded model, one whose code depends on the values of tensors, or an
            output without gradient.
        RuntimeError: the pass fails, as it would with real tensors of these shapes and dtypes.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
        >>> flow = octavo.dtype_flow(model, torch.randn(8, 64))
        >>> [(each.name, each.computes_in) for each in flow.operations if each.kind in ("product", "sum")][:2]
        [('addmm', 'BF16'), ('native_layer_norm', 'FP32')]
    """
    check_module(model, "dtype_flow")
    check_initialized(model)
    if autocast not in (torch.bfloat16, torch.float16, None):
        raise ValueError(f"autocast must be torch.bfloat16, torch.float16 or None, got {autocast!r}")
    tracer = Tracer(model, autocast)
    given = tracer.fake((inputs, keywords))
    both, tensors = _Pass(model, loss, tracer), {f"model.{name}": t for name, t in tracer.tensors.items()}
    with torch.enable_grad(), tracer:
        torch.func.functional_call(both, tensors, *given)
    operations, patterns = tuple(tracer.operations), patterns_of(model)
    left_out = find_left_out(model, operations, patterns)
    remarks = find_never_called(model, tracer.called, operations, patterns)
    name = "off" if autocast is None else NAMES[autocast]
    return DtypeFlow(type(model).__name__, name, operations, left_out, remarks, patterns)


class _Pass(nn.Module):
    """A forward and backward pass, as one module: recomputation in the backward pass needs the fake parameters too."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Tensor] | None, tracer: Tracer) -> None:
        super().__init__()
        self.model, self.loss, self.tracer = model, loss, tracer

    def forward(self, *inputs: Any, **keywords: Any) -> None:
        with self.tracer.autocast():
            output = self.model(*inputs, **keywords)
            output = output if self.loss is None else self.loss(output)
        start = getattr(output, "loss", None)
        if hasattr(output, "values") and not isinstance(output, Tensor):  # a dictionary of transformers' own class
            output = list(output.values())
        found = [start] if isinstance(start, Tensor) else tree_leaves(output)
        found = [t for t in found if isinstance(t, Tensor) and t.requires_grad]
        if not found:
            raise ValueError(
                f"the output of {type(self.model).__name__} has no gradient, so there is no backward pass: give a "
                "model whose parameters require one"
            )
        torch.autograd.backward(found, [torch.empty_like(t) for t in found])
