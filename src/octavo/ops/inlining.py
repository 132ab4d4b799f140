"""Kernels in compiled code: the compiler is given their launches, not a call into Python for each operation.

A custom operation costs its graph 50 to 100 µs of the host's time, more than many kernels run; a launch that Inductor
makes costs a tenth. So where an operation of ours is going to run kernels it is replaced by them as its graph is made
functional (what `torch.library.triton_op` does, but for tensors on CUDA of static sizes only: elsewhere the operation
stays whole, for its twin shall not be compiled into something that rounds otherwise).

Inductor compiles the kernels anew, with the options that it has for its own: a kernel that must not contract a product
and a sum says so itself (`device_math.add`), and has no float among its arguments but constants (it would be float64).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.library import wrap_triton

_inlining = False


def launcher(kernel: Any, grid: tuple[int, ...]) -> Any:
    """What to call with the arguments of a Triton kernel."""
    return (wrap_triton(kernel) if _inlining else kernel)[grid]


def operation(name: str, runs_kernels: Callable[..., bool]) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register a function as the operation `name`, to be replaced by what it does where `runs_kernels` of its arguments
    and the graph is compiled."""

    def register(function: Callable[..., Any]) -> CustomOpDef:
        def rule(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if kwargs or not _static(args) or not runs_kernels(*args):
                return mode.__torch_dispatch__(op, types, args, kwargs)
            with mode, _kernels_wrapped():
                return function(*args)

        registered = torch.library.custom_op(name, function, mutates_args=())
        registered.register_torch_dispatch(FunctionalTensorMode, rule)
        return registered

    return register


def _static(args: tuple[Any, ...]) -> bool:
    tensors = [t for a in args for t in (a if isinstance(a, list | tuple) else [a]) if isinstance(t, Tensor)]
    return all(isinstance(size, int) for t in tensors for size in t.shape)


@contextmanager
def _kernels_wrapped() -> Iterator[None]:
    global _inlining
    before, _inlining = _inlining, True
    try:
        yield
    finally:
        _inlining = before
