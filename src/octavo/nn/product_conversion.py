"""The modules other than linear layers that `convert` changes: attention, and convolutions that are products.

Each becomes a subclass of its class with a forward of ours: parameters, `state_dict`, hooks and `isinstance` stay as
they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from octavo.nn.attention import MultiheadAttention, input_weights, is_convertible
from octavo.nn.conversion_report import Row
from octavo.nn.convolution import PatchConvolution, gemm_shape, is_gemm, reads_image
from octavo.nn.linear import convert_layer, restore_layer
from octavo.nn.module_class import is_fsdp_module
from octavo.nn.selection import ATTENTION_OUTPUT, skipped_by_name
from octavo.ops.checks import FLOATS
from octavo.recipe import Recipe


def find_products(model: nn.Module) -> dict[str, nn.Module]:
    """The attention and the convolutions of `model` that can run in FP8, by name."""
    return {name: module for name, module in model.named_modules() if _is_convertible(module)}


def _is_convertible(module: nn.Module) -> bool:
    known = is_convertible(module) if isinstance(module, nn.MultiheadAttention) else is_gemm(module)
    return known and not is_fsdp_module(module) and all(p.dtype in FLOATS for p in module.parameters(recurse=False))


def product_rows(products: Mapping[str, nn.Module], skip: Sequence[str]) -> tuple[Row, ...]:
    """A row of the report for each weight of attention, under the name of the parameter, and for each convolution."""
    return tuple(
        Row(weight, shape, skipped_by_name(name, *shape, skip) or _reason(module))
        for name, module in products.items()
        for weight, shape in _weights(name, module).items()
    )


def _reason(module: nn.Module) -> str:
    """Why a module is left as it is, whatever its name, or ""."""
    if not isinstance(module, nn.MultiheadAttention) and reads_image(module):
        return "it reads the image, whose rounding raises the loss of diffusion"
    return ""


def _weights(name: str, module: Any) -> dict[str, tuple[int, int]]:
    """The shapes [N, K] of the weights by the names of their rows."""
    if not isinstance(module, nn.MultiheadAttention):
        return {name: gemm_shape(module)}
    return {f"{name}.{leaf}".lstrip("."): (w.shape[0], w.shape[1]) for leaf, w in input_weights(module).items()}


def chosen_products(products: Mapping[str, nn.Module], rows: Sequence[Row]) -> set[str]:
    """The names of the modules whose rows are all to be converted."""
    skipped = {row.name for row in rows if row.reason}
    return {name for name, module in products.items() if skipped.isdisjoint(_weights(name, module))}


def follow_attention(rows: Sequence[Row], products: Mapping[str, nn.Module], chosen: set[str]) -> tuple[Row, ...]:
    """The rows of linear layers, in which the output layer of attention is converted only where its attention is."""
    outputs = {
        f"{name}.out_proj".lstrip("."): name in chosen
        for name, module in products.items()
        if isinstance(module, nn.MultiheadAttention)
    }
    return tuple(_follow(row, called=outputs.get(row.name)) for row in rows)


def _follow(row: Row, *, called: bool | None) -> Row:
    if called and row.reason == ATTENTION_OUTPUT:
        return replace(row, reason="")
    return replace(row, reason=ATTENTION_OUTPUT) if called is False and not row.reason else row


def convert_products(products: Mapping[str, nn.Module], recipe: Recipe, chosen: set[str]) -> None:
    """Convert the modules `chosen`, and restore the others."""
    for name, module in products.items():
        restore_layer(module)
        if name in chosen:
            ours = MultiheadAttention if isinstance(module, nn.MultiheadAttention) else PatchConvolution
            convert_layer(module, ours, recipe, name)
