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
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from octavo.recipe import Recipe
from octavo.version import __version__

_LIBRARY: Any = torch.library.Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]
_COMPILED = ("nn", "numerics", "ops", "recipe")  # the packages whose code AOTAutograd traces


def source_version(root: Path) -> str:
    """A string that is another one after each change of the code that AOTAutograd traces; `root` is that of octavo."""
    files = sorted(path for package in _COMPILED for path in (root / package).rglob("*.py"))
    changed = [(str(path), path.stat().st_mtime_ns) for path in files]
    return f"{__version__} {sha256(repr(changed).encode()).hexdigest()}"


# An argument of each composite operation. PyTorch keeps compiled graphs on disk, and finds one by the names and
# arguments of its operations.
SOURCE = source_version(Path(__file__).parents[1])


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
