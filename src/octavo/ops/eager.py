"""Calls of our operations, without PyTorch's dispatcher where nothing traces, records or transforms the call.

A call through the dispatcher costs 50 to 100 µs of the host's time, since our operations are Python functions. That is
more than many kernels run, and it would decide the time of a decoding step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.autograd.graph import increment_version
from torch.nn import Parameter

TENSORS = frozenset((Tensor, Parameter))
OTHERS = frozenset((int, float, bool, str, torch.dtype, type(None)))
PLAIN = TENSORS | OTHERS


class Operation:
    """A registered operation. A call runs `function` itself where the result is the same as through the dispatcher.

    Args:
        function: takes positional arguments, the first a tensor or a list of tensors on the device that it runs on.
        registered: the operation made of `function`.
        mutated: the positions of the arguments that the function writes to.
    """

    def __init__(self, function: Callable[..., Any], registered: CustomOpDef, mutated: tuple[int, ...]) -> None:
        self.function, self.mutated = function, mutated
        self.register_fake = registered.register_fake
        self.overload = registered._opoverload

    def __call__(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.overload(*args)
        values = (*args[0], *args[1:]) if type(args[0]) is list else args
        if not _is_plain(values):
            return self.overload(*args)
        if self.mutated:  # autograd must notice that a tensor it saved has changed
            increment_version([args[i] for i in self.mutated if not args[i].is_inference()])
        return on_device_of_first(self.function, *args)


def _is_plain(values: tuple[Any, ...]) -> bool:
    """Whether only the function sees the call: no mode or transform is on (fake tensors, torch.func, torch.jit.trace, a
    profiler of FLOPs), all tensors hold numbers and are of no subclass, and none gets a gradient.
    """
    return (
        not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and PLAIN.issuperset(map(type, values))
        and not values[0].is_meta
        and not (torch.is_grad_enabled() and any(type(value) in TENSORS and value.requires_grad for value in values))
    )


def on_device_of_first(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` with the device of its first tensor as the current one: Triton launches there."""
    first = args[0] if isinstance(args[0], Tensor) else args[0][0]
    if not first.is_cuda or first.get_device() == torch.cuda.current_device():
        return function(*args)
    with torch.cuda.device(first.device):
        return function(*args)
