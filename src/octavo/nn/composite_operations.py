"""Layers as operations of PyTorch's dispatcher, for torch.compile.

Dynamo traces an autograd function as Python code, forward and backward, in each layer of a model. That takes it several
times as long as the rest of the model. It does not trace into operations, so compiled code calls an operation in place
of the function. The operation is composite: when AOTAutograd traces the graph, it runs the operation's code, which
applies the autograd function. So the graph that is compiled has the operations of the function, and not this one.

An operation takes tensors, numbers and strings. A string stands for the recipe (`Recipe.text`).

A function that writes to a history of delayed scaling or to an observer is still traced. Both are written to in the
backward pass too, where PyTorch would take them for saved tensors that may not change.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from octavo.recipe import Recipe

_LIBRARY: Any = torch.library.Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]


def composite(schema: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the operation `octavo::` of this schema, and return what calls the operation."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = schema[: schema.index("(")]
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
        overload: Callable[..., Any] = getattr(torch.ops.octavo, name).default
        return overload

    return register


read_recipe = cache(Recipe.from_json)
