"""The products that do not run in FP8, each with its share of the FLOPs, and the modules that a pass never calls."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from octavo.flow.folding import patterns_of
from octavo.flow.operation import Operation
from octavo.nn.attention import is_convertible
from octavo.nn.convolution import is_gemm
from octavo.nn.expert_conversion import find_experts
from octavo.nn.linear import RecipeLayer
from octavo.nn.selection import select_linears

_NOT_CONVERTED = "not converted: octavo.convert(model) would run it in FP8"


@dataclass(frozen=True)
class LeftOut:
    """Products, convolutions or attention that run in another dtype than FP8; repeated modules are one entry.

    Args:
        module: its name, with * for the indices of repeated modules.
        count: of modules.
        what: such as "linear layer" or "convolution".
        dtype: that it computes in.
        share: of the FLOPs of the pass, 0 to 1.
        reason: why `octavo.convert` leaves it, or that it would convert it.
    """

    module: str
    count: int
    what: str
    dtype: str
    share: float
    reason: str


@dataclass(frozen=True)
class NeverCalled:
    """Modules with parameters whose `forward` does not run in the pass, so that hooks and conversion have no effect.

    Args:
        module: its name, with * for the indices of repeated modules.
        count: of modules.
        what: the class.
        read: whether an operation reads the parameters all the same.
    """

    module: str
    count: int
    what: str
    read: bool


def find_left_out(model: nn.Module, operations: Sequence[Operation]) -> tuple[LeftOut, ...]:
    """The products of `operations` that do not run in FP8, the largest share first."""
    patterns, modules, reasons = patterns_of(model), dict(model.named_modules()), _skip_reasons(model)
    dimensions = {name: p.ndim for name, p in model.named_parameters()}
    total = sum(each.flops for each in operations) or 1
    groups: dict[tuple[str, str, str, str], tuple[set[str], int]] = {}
    for each in operations:
        if each.flops and each.computes_in != "FP8":
            stacked = any(dimensions[name] > 2 for name in each.parameters)
            what, reason = _explain(each, modules[each.module], reasons.get(each.module, ""), stacked=stacked)
            key = patterns[each.module], what, each.computes_in, reason
            names, flops = groups.get(key, (set(), 0))
            groups[key] = names | {each.module}, flops + each.flops
    found = [
        LeftOut(pattern, len(names), what, dtype, flops / total, reason)
        for (pattern, what, dtype, reason), (names, flops) in groups.items()
    ]
    return tuple(sorted(found, key=lambda each: -each.share))


def find_never_called(model: nn.Module, called: set[str], operations: Sequence[Operation]) -> tuple[NeverCalled, ...]:
    """The modules with parameters of their own that are not in `called`."""
    read = {name.rpartition(".")[0] for each in operations for name in each.parameters}
    patterns, groups = patterns_of(model), Counter[tuple[str, str, bool]]()
    for name, module in model.named_modules():
        if name not in called and next(module.parameters(recurse=False), None) is not None:
            groups[patterns[name], type(module).__name__, name in read] += 1
    return tuple(NeverCalled(pattern, count, what, used) for (pattern, what, used), count in groups.items())


def _skip_reasons(model: nn.Module) -> dict[str, str]:
    """Why `octavo.convert` skips each linear layer; "" for one that it converts."""
    try:
        return {layer.name: layer.reason for layer in select_linears(model)}
    except ValueError:  # no layer can be converted
        return {}


def _explain(operation: Operation, owner: nn.Module, skipped: str, *, stacked: bool) -> tuple[str, str]:
    if operation.kind == "attention":
        return "attention", "it multiplies activations: convert leaves attention alone"
    if isinstance(owner, RecipeLayer) and operation.parameters:
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
