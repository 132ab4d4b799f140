"""Launches of Triton kernels by eager code.

`kernel[grid](...)` works out at each call which compiled kernel its arguments need, which takes most of the host's time
for a launch. Here the compiled kernel that the first such call returns is kept, with everything that decided its
choice: dtype and alignment of the pointers, properties of the integers, the constants, the grid and the device. A later
call with the same key launches it as Triton's tutorials launch a compiled kernel, `compiled[grid](...)`. Where that
interface differs, `kernel[grid](...)` runs as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

MOST = 10_000  # launches known at a time; a grid depends on the number of tokens
_known: dict[tuple[Any, ...], tuple[Callable[..., Any], tuple[Any, ...], Any]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch `kernel` on `grid`.

    Args:
        kernel: a function of `triton.jit`, whose constants are its last parameters.
        args: tensors, integers and None for its first parameters; the first is a tensor on the current device.
        constants: its constants, and options of the compiler such as `num_warps`.
    """
    key = (id(kernel), args[0].get_device(), grid, *_kinds(args), *constants.values())
    found = _known.get(key)
    if found is not None:
        run, rest, _ = found
        try:
            run(*args, *rest)
        except (AttributeError, TypeError):  # a Triton whose compiled kernels are launched in another way
            kernel[grid](*args, **constants)
        return
    compiled = kernel[grid](*args, **constants)
    if type(compiled).__name__ != "CompiledKernel":  # nothing that can be launched again: Triton's interpreter
        return
    if len(_known) >= MOST:
        _known.clear()
    # With the kernel, so that no other one gets its id. Triton's own hash of a kernel takes longer.
    _known[key] = compiled[(*grid, 1, 1)[:3]], _constants_in_order(kernel, args, constants), kernel


def _kinds(args: Sequence[Any]) -> list[Any]:
    """What Triton's choice of a compiled kernel depends on, of arguments that are not constants."""
    kinds: list[Any] = []
    for arg in args:
        if arg is None:
            kinds.append(None)
        elif type(arg) is int:
            kinds.append(arg if arg == 1 else (arg % 16 == 0, -(2**31) <= arg < 2**31, arg < 2**63))
        else:
            kinds.append(arg.dtype if arg.data_ptr() % 16 == 0 else (arg.dtype,))
    return kinds


def _constants_in_order(kernel: Any, args: Sequence[Any], constants: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(constants[name] for name in kernel.arg_names[len(args) :])
