"""Operations that record statistics in the steps that are sampled, and the flag of the host that says when.

In other steps such an operation returns at once. So a model is compiled once, with the operations in its graph, and a
step that is not sampled costs a call of each.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ClassVar, ParamSpec

import torch

from octavo.ops.inductor import OPERATIONS

P = ParamSpec("P")


class Sampling:
    """What is recorded now, by any watch of the process."""

    active = False
    full = 0  # rows of each operand in a full sample; 0: none
    brief = False
    _requests: ClassVar[dict[int, tuple[int, bool]]] = {}

    @classmethod
    def request(cls, watch: object, rows: int, *, brief: bool = False) -> None:
        """Record a full sample of `rows` rows of each operand, a brief one, or both, from now on; 0 and False: none."""
        cls._requests.pop(id(watch), None)
        if rows or brief:
            cls._requests[id(watch)] = rows, brief
        cls.full = max((rows for rows, _ in cls._requests.values()), default=0)
        cls.brief = any(brief for _, brief in cls._requests.values())
        cls.active = bool(cls._requests)


def is_recomputed(kind: str) -> bool:
    """Whether this is an operand of a forward pass within a backward pass, as activation checkpointing runs it."""
    of_backward = kind == "dy" or kind.endswith("_gradient")
    return not of_backward and torch._C._current_graph_task_id() != -1


def sampled_operation(*mutated: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Register a function as the operation `octavo::` with its name, and return what calls it in sampled steps.

    A compiler, and the modes of checkpointing, get one operation, which they call in every step. It is not made by
    `torch.library.custom_op`: a call of such an operation takes 48 µs of the host's time, and one of this 3 µs.

    Args:
        mutated: the names of the arguments that the function writes to.
    """

    def register(function: Callable[P, None]) -> Callable[P, None]:
        name, defaults = function.__name__, _defaults(function)
        schema = torch.library.infer_schema(_without_defaults(function), mutates_args=mutated)
        _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"octavo::{name}", lambda *args: None)
        OPERATIONS[name] = function, lambda *args: False
        overload: Any = getattr(torch.ops.octavo, name).default

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> None:
            if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
                # All by position: Inductor lowers the operation without names.
                overload(*args, *[kwargs.get(name, default) for name, default in defaults[len(args) :]])
            elif Sampling.active:
                function(*args, **kwargs)

        return call

    return register


def _defaults(function: Callable[..., None]) -> list[tuple[str, Any]]:
    return [(name, parameter.default) for name, parameter in inspect.signature(function).parameters.items()]


def _without_defaults(function: Callable[..., None]) -> Callable[..., None]:
    """`function` with a signature without defaults, from which an operation without defaults follows."""
    signature = inspect.signature(function)
    parameters = [p.replace(default=inspect.Parameter.empty) for p in signature.parameters.values()]

    @wraps(function)
    def positional(*args: Any) -> None:
        function(*args)

    positional.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return positional


_LIBRARY: Any = torch.library.Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]
