"""Errors for the uses of PyTorch that the converted layers do not support.

Code that a compiler traces is not checked: an eager call with the same inputs raises the error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from octavo.ops.checks import FLOATS


def unsupported(what: str) -> NotImplementedError:
    """The error for a use of PyTorch, `what`, that the layers do not support."""
    return NotImplementedError(
        f"octavo's layers do not support {what}. octavo.restore(model) makes them plain PyTorch layers again"
    )


def check_module(model: object, function: str) -> None:
    """Raise a TypeError, which names the public function `function`, unless `model` is a module."""
    if not isinstance(model, nn.Module):
        text = repr(model)
        shown = text if len(text) <= 100 and "\n" not in text else f"a {type(model).__name__}"  # of a tensor: pages
        raise TypeError(f"{function} takes a torch.nn.Module, got {shown}: pass the model itself")


def check_call(layer: Any, x: Tensor, *weights: Tensor) -> None:
    """Raise an error if this forward pass cannot run.

    Args:
        layer: with a `recipe` (one without casts takes every dtype) and a `name`. Compiled code must not read the name:
            torch.compile would guard on it and compile each block of a model again.
        x, weights: the input [..., K], and the weights of the layers. The first, [N, K] or [E, N, K], multiplies x.

    Raises:
        TypeError: a dtype that cannot be quantized.
        ValueError: the input has another width than the first weight.
        NotImplementedError: a nested or sparse input, a DTensor, forward-mode differentiation, a transform of
            torch.func, ONNX export.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    onnx = sys.modules.get("torch.onnx")  # PyTorch imports it at its first use
    if onnx is not None and onnx.is_in_onnx_export():
        raise unsupported("export to ONNX, which has no operations for their scaled GEMMs")
    if torch.compiler.is_compiling():
        return
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise unsupported("the transforms of torch.func (grad, vmap, jvp and others)")
    for what, t in (("its input", x), *(("its weight", w) for w in weights)):
        if forward_ad.unpack_dual(t).tangent is not None:  # type: ignore[no-untyped-call]
            raise unsupported("forward-mode differentiation (torch.autograd.forward_ad)")
        if hasattr(t, "device_mesh"):
            raise unsupported(
                "PyTorch's styles of tensor parallelism, or a weight that FSDP2 has not gathered (in "
                f"{_named(layer)}, {what} is a DTensor): take the styles of octavo.dist (tensor_parallel, "
                "ColumnParallel, RowParallel), or call fully_shard on the block, not on a part of it"
            )
        if layer.recipe.quantized and t.dtype not in FLOATS:
            raise TypeError(
                f"{_named(layer)} takes float32, bfloat16 or float16, {what} is {t.dtype} {list(t.shape)}: "
                "convert it to one of these, or leave the layer out of octavo.convert by skip="
            )
    if x.is_nested or x.is_sparse:
        raise unsupported("nested and sparse inputs: give the values as a dense tensor")
    if weights:
        check_width(layer, x, weights[0].shape)


def check_width(layer: Any, x: Tensor, weight: Sequence[int]) -> None:
    """Raise ValueError unless the input `x` has the width of a weight of this shape, [N, K] or [E, N, K]."""
    width = weight[-1]
    if x.ndim == 0 or x.shape[-1] != width:
        kind = f"a {type(layer).__name__} with a weight {list(weight)}"
        name = f"{_named(layer)}, {kind}," if layer.name else kind
        raise ValueError(
            f"{name} takes an input [..., {width}], got {list(x.shape)}: give it an input whose last dimension is "
            f"{width}"
        )


def _named(layer: Any) -> str:
    """The layer in a message. One that is the whole model has no name."""
    return f"the layer {layer.name!r}" if layer.name else f"a {type(layer).__name__}"


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `backward` so that differentiating its gradients again (`create_graph=True`) raises an error."""

    @wraps(backward)
    def run(ctx: Any, *gradients: Tensor | None) -> Any:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        with torch.no_grad():
            results = backward(ctx, *gradients)
        return _Final.apply(*(g if g is None else g.detach().requires_grad_() for g in results))  # type: ignore[no-untyped-call]

    return run


class _Final(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise unsupported("double backward (create_graph=True)")
