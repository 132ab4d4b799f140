"""From a plain model to one whose linear layers run as a recipe says, with an account of what was and was not done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from octavo.nn.backends import gemm_backends, pick_recipe
from octavo.nn.conv1d import shape_of, to_fp8_conv1d
from octavo.nn.conversion_report import Conversion, Row
from octavo.nn.coverage import Coverage, find_coverage
from octavo.nn.fast_path import leave_fast_paths
from octavo.nn.linear import to_fp8_linear
from octavo.nn.mlp import FusedMLP
from octavo.nn.norm_linear import NormLinear, fusable_layers, read_norm
from octavo.nn.restoration import restore_linear
from octavo.nn.selection import select_linears
from octavo.nn.speedup.lookup import LEAST_GAIN, Gains, find_gains, hides_launching
from octavo.nn.transformers_fusion import fuse_patterns
from octavo.recipe import Recipe, get_recipe


def convert(
    model: nn.Module,
    recipe: str | Recipe = "rowwise",
    *,
    skip: Sequence[str] = (),
    emulate: bool = False,
    only_if_faster: bool = False,
    tokens: int = 8192,
) -> Conversion:
    """Make the linear layers of `model` run as `recipe` says, in place; parameters and `state_dict` stay as they are.

    A module changes its class, not its identity: hooks, tied parameters and references to it keep working.
    `octavo.restore` is the way back. A layer that an earlier conversion changed, and that this one skips, is restored.

    The `Conv1D` of transformers' GPT-2 is a linear layer whose weight is transposed. Where the recipe's scales fold
    (`rowwise`), `NormLinear` and `SwiGLU` modules quantize in the pass that norms or activates, and so do the decoder
    layers of transformers' Llama, Mistral, Qwen2 and Qwen3 (`octavo.nn.transformers_fusion`).
    `nn.TransformerEncoderLayer` leaves PyTorch's fast path, which would not call its converted layers.

    Args:
        model: any module; embeddings and norms are no linear layers and stay, output heads and routers are skipped.
        recipe: a preset's name, a `Recipe`, or "auto": `rowwise` where the device of `model` has its GEMMs, else what
            comes nearest and runs there (the report says which).
        skip: globs of module names to leave as they are, beside `DEFAULT_SKIP` and heads tied to an embedding.
        emulate: on a GPU without the GEMM that the recipe needs, compute it slowly in float32 instead of raising.
        only_if_faster: leave in BF16 each layer whose forward and backward pass FP8 would not speed up on the device
            that `model` is on now (`octavo.nn.speedup`; the report has the figures; layers that run as one GEMM count
            as one), and all of them where together they are too little work to hide the longer launching of FP8.
            Where FP8 is emulated, or has no GEMM, that is every layer, and no error. On a GPU of which nothing is known
            the layers are timed first.
        tokens: rows that a forward pass gives a layer, batch x sequence; read with `only_if_faster`.

    Returns:
        The report: the layers converted and skipped with reasons, what each GEMM runs on, and the parameters that stay
        in high precision, with their share of the model.

    Raises:
        TypeError: `model` is no module, or `recipe` neither a name nor a `Recipe`.
        ValueError: an unknown recipe, a glob of `skip` that matches nothing, no linear layer left to convert, or a GPU
            without the GEMMs that the recipe needs.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert takes a torch.nn.Module, got {model!r}: pass the model itself")
    layers = select_linears(model, skip)
    linears = {layer.name: layer.module for layer in layers}
    first_layer: Any = layers[0].module
    device = first_layer.weight.device
    recipe = pick_recipe(device) if recipe == "auto" else get_recipe(recipe)
    if emulate:
        recipe = replace(recipe, emulate=True)
    rows = tuple(Row(layer.name, shape_of(layer.module), layer.reason) for layer in layers)
    report = Conversion(recipe, rows, gemm_backends(recipe, device), _coverage(model, recipe, rows))
    if not recipe.emulate and not only_if_faster:
        _check_runs(report)
    if recipe.fusable:
        fuse_patterns(model)
    if only_if_faster:
        report = _only_faster(report, model, linears, device, tokens)
        report = replace(report, coverage=_coverage(model, recipe, report.rows))
    for row in report.rows:
        if row.reason:
            restore_linear(linears[row.name])  # an earlier conversion may have changed it
        else:
            _convert_layer(linears[row.name], recipe, row.name)
    leave_fast_paths(model)
    return replace(report, fused=_fused(model))


def _convert_layer(layer: nn.Module, recipe: Recipe, name: str) -> None:
    if isinstance(layer, nn.Linear):
        to_fp8_linear(layer, recipe, name)
    else:
        to_fp8_conv1d(layer, recipe, name)


def _coverage(model: nn.Module, recipe: Recipe, rows: Sequence[Row]) -> Coverage:
    """The coverage of `model` where the layers of `rows` that have no reason to be skipped run `recipe`."""
    return find_coverage(model, [row.name for row in rows if not row.reason] if recipe.quantized else ())


def _check_runs(report: Conversion) -> None:
    missing = [f"{gemm}: {backend.reason}" for gemm, backend in report.backends.items() if backend.name == "none"]
    if missing:
        raise ValueError(
            f"this device cannot run the recipe {report.recipe.name} ({'; '.join(missing)}): `octavo doctor` lists "
            'what it can, recipe="auto" takes what comes nearest, and emulate=True computes it slowly in float32'
        )


def _fused(model: nn.Module) -> dict[str, str]:
    """Names of the modules that run several layers in one pass, and which."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, NormLinear) and fusable_layers(module.linears) and read_norm(module.norm):
            found[name] = f"{type(module.norm).__name__} + {module.extra_repr()}"
        elif isinstance(module, FusedMLP) and fusable_layers((*module.inner, module.outer)):
            found[name] = f"{module.activation} MLP"
    return found


def _only_faster(
    report: Conversion, model: nn.Module, linears: dict[str, nn.Module], device: torch.device, tokens: int
) -> Conversion:
    """The report with the gains, and the layers that FP8 would not speed up among the skipped; these are BF16 then."""
    widths = _gemm_widths(report, model, linears)
    shapes = {(tokens, row.shape[1], widths[row.name]) for row in report.rows if not row.reason}
    gains = find_gains(report.recipe, report.backends, device, shapes)
    rows = tuple(row if row.reason else _weighed(row, gains, tokens, widths[row.name]) for row in report.rows)
    weighed = replace(report, rows=rows, gains=gains.source)
    if not hides_launching([(tokens, row.shape[1], row.shape[0]) for row in rows if not row.reason]):
        idle = "so little work that the GPU would wait for the host: left in BF16"
        weighed = replace(weighed, rows=tuple(row if row.reason else replace(row, reason=idle) for row in rows))
    return weighed


def _gemm_widths(report: Conversion, model: nn.Module, linears: dict[str, nn.Module]) -> dict[str, int]:
    """N of the GEMM that a layer to be converted runs in, by name: of its stack, where all of that is converted."""
    names = {id(linears[name]): name for name in report.converted}
    widths = {name: shape_of(linears[name])[0] for name in report.converted}
    modules = [m for m in model.modules() if report.recipe.fusable and isinstance(m, NormLinear | FusedMLP)]
    for module in modules:
        stack = module.linears if isinstance(module, NormLinear) else module.inner
        if all(id(layer) in names for layer in stack):
            together = sum(shape_of(layer)[0] for layer in stack)
            widths.update({names[id(layer)]: together for layer in stack})
    return widths


def _weighed(row: Row, gains: Gains, tokens: int, width: int) -> Row:
    gain = gains.by_shape.get((tokens, row.shape[1], width))
    if gain is None:
        return replace(row, reason=gains.source)
    return replace(row, gain=gain, reason="" if gain >= LEAST_GAIN else f"{gain:.2f}x: left in BF16")
