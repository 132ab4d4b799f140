"""Launches of Triton kernels, and the memory of their results, in eager code.

`kernel[grid](...)` works out at each call which compiled kernel its arguments need, which takes most of the host's time
for a launch. Here the compiled kernel that the first such call returns is cached, under everything that decided its
choice: dtype and alignment of the pointers, properties of the integers, the constants, the grid and the device. A later
call with the same key calls its launcher as Triton and Inductor do, with addresses in place of tensors: for a tensor,
the launcher asks Python and the driver for the address. Where the launcher takes other arguments, `kernel[grid](...)`
runs as before. Triton's hooks of launches, which its profiler Proton sets, see the first launch of each key only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from octavo.ops.compiling import running

MOST = 10_000  # launches cached at a time; a grid depends on the number of tokens
_cached: dict[tuple[Any, ...], tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...], Any]] = {}
_empty_cuda = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)  # of Inductor: a third of the time
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def allocate(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """A contiguous tensor on the device of `like`, the current one, not initialized; in its dtype by default."""
    dtype = like.dtype if dtype is None else dtype
    if _empty_cuda is None or type(like) is not Tensor or not like.is_cuda:
        return like.new_empty(shape, dtype=dtype)
    shape = tuple(shape)  # not a torch.Size, which the function refuses
    made: Tensor = _empty_cuda(shape, _strides(shape), dtype)
    return made


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of `shape`."""
    return tuple(prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch `kernel` on `grid`.

    Args:
        kernel: a function of `triton.jit`, whose constants are its last parameters.
        args: tensors, integers and None for its first parameters; the first is a tensor on the current device.
        constants: its constants, and options of the compiler such as `num_warps`.
    """
    device = args[0].get_device()
    kinds, values = _read(args, device)
    key = (id(kernel), device, grid, *kinds, *constants.values())
    found = _cached.get(key)
    if found is not None:
        run, handles, rest, _ = found
        try:
            run(_current_stream(device), *handles, None, None, None, *values, *rest)
        except (AttributeError, TypeError):  # a Triton whose launcher takes other arguments
            kernel[grid](*args, **constants)
        return
    if (compilation := running.get()) is not None:
        compilation.add(kernel, (id(kernel), *kinds, *constants.values()), grid, args, constants)
        return
    compiled = kernel[grid](*args, **constants)
    if type(compiled).__name__ == "CompiledKernel":  # Triton's interpreter returns None
        if len(_cached) >= MOST:
            _cached.clear()
        rest = tuple(constants[name] for name in kernel.arg_names[len(args) :])
        handles = compiled.function, compiled.packed_metadata
        # With the kernel, so that no other one gets its id. Triton's own hash of a kernel takes longer.
        _cached[key] = partial(compiled.run, *(*grid, 1, 1)[:3]), handles, rest, kernel


def _read(args: tuple[Any, ...], device: int) -> tuple[list[Any], list[Any]]:
    """The properties of each argument that decide Triton's choice of a compiled kernel, and the arguments for its
    launcher, tensors as addresses."""
    kinds: list[Any] = []
    values = list(args)
    for i, arg in enumerate(args):
        if arg is None:
            kinds.append(None)
        elif type(arg) is int:
            kinds.append(arg if arg == 1 else (arg % 16 == 0, -(2**31) <= arg < 2**31, arg < 2**63))
        else:
            address = values[i] = arg.data_ptr()
            kinds.append(arg.dtype if address % 16 == 0 else (arg.dtype,))
            if arg.get_device() != device:
                raise ValueError(
                    f"the tensors of an operation must be on one device, got cuda:{device} and {arg.device}"
                )
    return kinds, values
