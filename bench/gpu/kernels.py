"""Each kernel against a copy of as many bytes as the kernel must move, in the same run and timed in the same way.

First every byte is compared with the reference's on the same device.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bench.gpu.harness import DEVICE, Options, Results, benchmark, replayed, sized
from octavo.numerics import TENSOR, Cast
from octavo.ops import activation, norm, quantization, quantize, rotation, transposition
from octavo.ops.registration import Operation
from octavo.recipe import BLOCK_W, BLOCK_X, MX_GROUPS, ROW_W, ROW_X

T = sized(8192, 128)  # tokens
DY_CAST = Cast(scale="pow2")


class Kernel(NamedTuple):
    """An operation with its arguments, and the bytes that it must move for each of so many elements."""

    name: str
    operation: Operation[Any]
    arguments: tuple[Any, ...]
    elements: int
    bytes: float

    def run(self) -> Any:
        return self.operation(*self.arguments)


@cache
def copy_ms(moved: int) -> float:
    """Milliseconds of a copy that reads and writes `moved` bytes together."""
    source = torch.randint(256, (moved // 2,), device=DEVICE, dtype=torch.uint8)
    target = torch.empty_like(source)
    return replayed(lambda: target.copy_(source))


def check(kernel: Kernel) -> None:
    """Raise an AssertionError unless the eight-bit results, or the only one, have the bytes of the reference's."""
    results = tree_leaves(kernel.run())
    expected = tree_leaves(kernel.operation.function(*kernel.operation._read(kernel.arguments)))
    for found, required in zip(results, expected, strict=True):
        if isinstance(found, Tensor) and (found.element_size() == 1 or len(results) == 1):
            wrong = int((found.view(torch.uint8) != required.view(torch.uint8)).sum())
            assert wrong == 0, f"{kernel.name}: {wrong} of {found.numel()} bytes are not the reference's"


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def factors(columns: int) -> tuple[Tensor, Tensor]:
    """Positive numbers [1, columns] and [T, 1]."""
    return torch.rand(1, columns, device=DEVICE) + 0.5, torch.rand(T, 1, device=DEVICE) + 1


def kernels(k: int) -> Iterator[Kernel]:
    """The kernels on tensors [8192, k]."""
    x, n = bf16(T, k), T * k
    for seed in (None, torch.tensor(2**40 + 1, device=DEVICE)):
        yield from quantizations(x, seed)
    yield Kernel("rotate", rotation._rotate, (x, None), n, 4)
    q, again = quantize(x, ROW_X), quantization._requantize
    shift = torch.randint(0, 4, (T,), device=DEVICE, dtype=torch.int32)
    for name, places in (("transpose", None), ("transpose, exponents shifted", shift)):
        yield Kernel(name, transposition._transpose, (q.data, places, None, None), n, 2)
    yield Kernel("cast again, transposed", again, ([x], q.scale, ROW_X.format, "row", True, None), n, 3)
    if k == 4096:
        yield from norms(x)
    if k == 14336:
        yield from activations(k)


def quantizations(x: Tensor, seed: Tensor | None) -> Iterator[Kernel]:
    """The quantizations of x: to nearest, or stochastically with a seed."""
    rounding, tensor = "" if seed is None else ", stochastic", Cast(granularity=TENSOR)
    column, row = factors(x.shape[1])
    scale = x.abs().amax().float().view(1, 1) / 448
    for name, cast, columns, rows, moved in (
        ("rows", ROW_X, None, None, 3),
        ("rows, floor (weights)", ROW_W, None, None, 3),
        ("rows, factors (dy)", DY_CAST, column, row, 3),
        ("1x128", BLOCK_X, None, None, 3),
        ("MX", MX_GROUPS, None, None, 3),
        ("128x128", BLOCK_W, None, None, 3),
        ("tensor", tensor, None, None, 5),
    ):
        arguments = x, cast.spec, columns, rows, seed, 1
        yield Kernel(f"quantize {name}{rounding}", quantization._quantize, arguments, x.numel(), moved)
    known = x, scale, tensor.format, seed
    yield Kernel(f"quantize tensor, known scale{rounding}", quantization._quantize_scaled, known, x.numel(), 3)
    for name, cast in (("1x128", BLOCK_X), ("MX", MX_GROUPS)):
        transposed = quantization._quantize_transposed
        yield Kernel(f"quantize {name}, transposed{rounding}", transposed, (x, cast.spec, seed, None), x.numel(), 3)


def norms(x: Tensor) -> Iterator[Kernel]:
    residual, weight, bias = bf16(*x.shape), bf16(x.shape[1]), bf16(x.shape[1])
    for name, center, beta in (("RMS norm", False, None), ("layer norm", True, bias)):
        arguments = x, residual, weight, beta, 1e-5, ROW_X.spec, center, True
        yield Kernel(f"{name} + residual + quantize", norm._norm_quantize, arguments, x.numel(), 7)
        total, _, scale, mean, rstd = norm._norm_quantize(*arguments)
        cast_again = total, mean if center else None, rstd, weight, beta, scale, ROW_X.format
        yield Kernel(f"{name}, cast again, transposed", quantization._requantize_norm, cast_again, x.numel(), 3)
        backward = x, residual, weight, mean, rstd, x, center
        yield Kernel(f"{name} + residual, backward", norm.norm_backward, backward, x.numel(), 8)


def activations(f: int) -> Iterator[Kernel]:
    dh = bf16(T, f)
    for kind, width in (("swiglu", 2), ("gelu", 1)):
        u = bf16(T, width * f)
        forward, moved = (u, kind, None, True, ROW_X.spec), 2 * width + 1
        yield Kernel(f"{kind} + quantize", activation._activation_quantize, forward, T * f, moved)
        _, scale = activation._activation_quantize(*forward)
        column, row = factors(width * f)
        arguments = dh, u, kind, DY_CAST.spec, column, None, row, None, None, None, ROW_X.spec, scale, False
        backward = activation._activation_backward
        yield Kernel(f"{kind} + quantize, backward", backward, arguments, T * f, moved + width + 2)


@benchmark()
def main(_: Options) -> Results:
    rows = []
    for k in sized((4096, 14336, 28672), (4096, 14336)):
        for kernel in kernels(k):
            check(kernel)
            moved = int(kernel.elements * kernel.bytes)
            ms, copy = replayed(kernel.run), copy_ms(moved)
            times = {"us": 1e3 * ms, "copy_us": 1e3 * copy, "share": copy / ms}
            rows.append({"kernel": kernel.name, "shape": [T, k], "bytes": moved, **times})
            yield "gpu_kernels", {"kernels": rows}
