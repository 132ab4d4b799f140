"""The layers that FP8 would not speed up, for `convert(..., only_if_faster=True)`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from octavo.nn.conversion_report import Row
from octavo.nn.linear import RecipeLayer
from octavo.nn.mlp import FusedMLP
from octavo.nn.norm_linear import NormLinear
from octavo.nn.speedup.lookup import LEAST_SPEEDUP, Speedups, hides_launching
from octavo.nn.speedup.table import Shape
from octavo.recipe import Recipe
from octavo.tracing.forward_pass import ForwardPass


def gemm_shapes(model: nn.Module, rows: Sequence[Row], recipe: Recipe, tokens: Mapping[str, int]) -> dict[str, Shape]:
    """(M, K, N) of the GEMM that each converted layer runs in. Fused layers run as one GEMM: N is their sum.

    Args:
        tokens: M for each of `rows` by name; layers of which it is 0 are left out, unless it is 0 for all.
    """
    some = any(tokens.values())
    converted = {row.name: row for row in rows if not row.reason and (tokens[row.name] or not some)}
    shapes = {name: (tokens[name], row.shape[1], row.shape[0]) for name, row in converted.items()}
    layers = {id(module): name for name, module in model.named_modules() if name in converted}
    for module in model.modules() if recipe.fusable else ():
        if isinstance(module, NormLinear | FusedMLP):
            fused = module.linears if isinstance(module, NormLinear) else module.inner
            stack = [converted[layers[id(layer)]] for layer in fused if id(layer) in layers]
            if len(stack) == len(fused):
                width = sum(row.shape[0] for row in stack)
                shapes.update({row.name: (tokens[row.name], row.shape[1], width) for row in stack})
    return shapes


def skip_uncalled(model: nn.Module, rows: Sequence[Row], forward: ForwardPass) -> tuple[Row, ...]:
    """Give linear layers whose weight the pass reads without calling them a reason to be skipped."""

    def judge(row: Row) -> Row:
        layer = model.get_submodule(row.name)
        never = row.name not in forward.called and not isinstance(layer, RecipeLayer)
        read = never and any(forward.rows_of(weight) for weight in layer.parameters(recurse=False))
        return replace(row, reason="the model reads its weight without calling it") if read and not row.reason else row

    return tuple(map(judge, rows))


def skip_slower(rows: Sequence[Row], shapes: Mapping[str, Shape], speedups: Speedups) -> tuple[Row, ...]:
    """Add the predicted speedups to the rows, and give the layers that FP8 would not speed up a reason to be skipped.

    If the layers that remain are too little work to keep the GPU busy while FP8 is launched, all are skipped.
    """
    judged = tuple(row if row.reason else _judge(row, shapes.get(row.name), speedups) for row in rows)
    remaining = [(shapes[row.name][0], row.shape[1], row.shape[0]) for row in judged if not row.reason]
    if hides_launching(remaining):
        return judged
    reason = "so little work that the GPU would wait for the host: left in BF16"
    return tuple(row if row.reason else replace(row, reason=reason) for row in judged)


def _judge(row: Row, shape: Shape | None, speedups: Speedups) -> Row:
    if shape is None:
        return replace(row, reason="the batch does not reach it: left in BF16")
    speedup = speedups.by_shape.get(shape)
    if speedup is None:
        return replace(row, reason=speedups.source)
    return replace(row, speedup=speedup, reason="" if speedup >= LEAST_SPEEDUP else f"{speedup:.2f}x: left in BF16")
