"""The layers that FP8 would not speed up, for `convert(..., only_if_faster=True)`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from octavo.nn.conversion_report import Row
from octavo.nn.mlp import FusedMLP
from octavo.nn.norm_linear import NormLinear
from octavo.nn.speedup.lookup import LEAST_SPEEDUP, Speedups, hides_launching
from octavo.nn.speedup.table import Shape
from octavo.recipe import Recipe


def gemm_shapes(model: nn.Module, rows: Sequence[Row], recipe: Recipe, tokens: int) -> dict[str, Shape]:
    """(M, K, N) of the GEMM that each converted layer runs in. Fused layers run as one GEMM: N is their sum."""
    converted = {id(model.get_submodule(row.name)): row for row in rows if not row.reason}
    shapes = {row.name: (tokens, row.shape[1], row.shape[0]) for row in converted.values()}
    for module in model.modules() if recipe.fusable else ():
        if isinstance(module, NormLinear | FusedMLP):
            layers = module.linears if isinstance(module, NormLinear) else module.inner
            stack = [converted[id(layer)] for layer in layers if id(layer) in converted]
            if len(stack) == len(layers):
                width = sum(row.shape[0] for row in stack)
                shapes.update({row.name: (tokens, row.shape[1], width) for row in stack})
    return shapes


def skip_slower(rows: Sequence[Row], shapes: Mapping[str, Shape], speedups: Speedups) -> tuple[Row, ...]:
    """Add the predicted speedups to the rows, and give the layers that FP8 would not speed up a reason to be skipped.

    If the layers that remain are too little work to keep the GPU busy while FP8 is launched, all are skipped.
    """
    judged = tuple(row if row.reason else _judge(row, shapes[row.name], speedups) for row in rows)
    remaining = [(shapes[row.name][0], row.shape[1], row.shape[0]) for row in judged if not row.reason]
    if hides_launching(remaining):
        return judged
    reason = "so little work that the GPU would wait for the host: left in BF16"
    return tuple(row if row.reason else replace(row, reason=reason) for row in judged)


def _judge(row: Row, shape: Shape, speedups: Speedups) -> Row:
    speedup = speedups.by_shape.get(shape)
    if speedup is None:
        return replace(row, reason=speedups.source)
    return replace(row, speedup=speedup, reason="" if speedup >= LEAST_SPEEDUP else f"{speedup:.2f}x: left in BF16")
