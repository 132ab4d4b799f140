"""The attention of transformers with rotary embedding in one pass, and its gradient in another, in eager training.

transformers' operations take ten passes, and their gradients sixteen. An attention calls them by a name of its module.
Here a copy of its forward runs, in which the name is that of another function; all else is transformers' own code.
"""

import inspect
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from octavo.nn.module_tools import autocast_dtype, differentiable_once, watched
from octavo.ops import turn_heads


def turning(attention: Any, arguments: dict[str, Any]) -> Callable[..., Any]:
    """`attention`, a module, or a copy of its forward, which computes the same for these arguments."""
    forward = type(attention).forward
    # From transformers 5.24 on a wrapper of the forward takes the old name of `cache`. The copy has no wrapper.
    renamed = arguments.get("past_key_values") is not None and hasattr(forward, "__wrapped__")
    if renamed or torch.compiler.is_compiling() or not torch.is_grad_enabled() or watched(attention):
        return attention  # type: ignore[no-any-return, unused-ignore]
    copy = _copied(forward)
    return attention if copy is None else partial(copy, attention)


@cache
def _copied(forward: Any) -> FunctionType | None:
    """None unless the forward, its wrapper and the function that it calls are transformers' own: other libraries
    replace these."""
    own, name = inspect.unwrap(forward), "apply_rotary_pos_emb"
    homes = [getattr(function, "__globals__", {}).get("__name__", "") for function in (forward, own)]
    theirs = own.__globals__.get(name) if all(home.startswith("transformers.") for home in homes) else None
    if theirs is None or getattr(theirs, "__module__", "") != homes[1] or own.__kwdefaults__:
        return None
    given = own.__globals__ | {name: partial(_rotate, theirs)}
    return FunctionType(own.__code__, given, None, own.__defaults__, own.__closure__)


def _rotate(theirs: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    plain = q.requires_grad and k.requires_grad and not (options or cos.requires_grad or sin.requires_grad)
    # With angles in float32, q and k are rounded here, as autocast rounds them before they are multiplied.
    known = cos.dtype == q.dtype or (cos.dtype == torch.float32 and q.dtype == autocast_dtype(q.device.type))
    if plain and known and q.dtype == k.dtype and q.shape[-1] == cos.shape[-1]:
        return _TurnHeads.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]
    return theirs(q, k, cos, sin, **options)


class _TurnHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return tuple(x.transpose(1, 2) for x in turn_heads(q, k, cos, sin, False))

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        return *(x.transpose(1, 2) for x in turn_heads(dq, dk, *ctx.saved_tensors, True)), None, None
