"""Each kernel against a copy of as many bytes as the kernel must move, in the same run and timed in the same way.

First every byte is compared with the reference's on the same device.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import record
from bench.gpu.harness import replayed
from octavo import ops
from octavo.numerics import Cast
from octavo.numerics.qtensor import TENSOR
from octavo.ops.activation import activation_backward_reference, activation_quantize_reference
from octavo.ops.norm import norm_quantize_reference
from octavo.ops.quantization import quantize_reference, quantize_scaled_reference
from octavo.ops.requantization import requantize_norm_reference, requantize_transposed_reference
from octavo.ops.rotation import rotate_reference
from octavo.ops.transposition import transpose_reference
from octavo.recipe import BLOCK_W, BLOCK_X, MX_GROUPS, ROW_W, ROW_X

T = 8192
DEVICE = "cuda"


class Kernel(NamedTuple):
    """A kernel at one size: the operation, its reference, and the bytes that it must move for an element."""

    name: str
    run: Callable[[], Any]
    reference: Callable[[], Any]
    elements: int
    bytes: float


def main() -> None:
    rows = []
    for k in (4096, 14336, 28672):
        for kernel in kernels(k):
            check(kernel)
            moved = int(kernel.elements * kernel.bytes)
            ms, copy = replayed(kernel.run), copy_ms(moved)
            times = {"us": 1e3 * ms, "copy_us": 1e3 * copy, "share": copy / ms}
            rows.append({"kernel": kernel.name, "shape": [T, k], "bytes": moved, **times})
            rate = f"{moved / ms / 1e9:5.2f} TB/s  {copy / ms:6.1%} of copy"
            print(f"{kernel.name:38} {T} x {k:<6} {1e3 * ms:8.1f} us  {rate}", flush=True)
    print(record.write("gpu_kernels", {"kernels": rows}))


@cache
def copy_ms(moved: int) -> float:
    """Milliseconds of a copy that reads and writes `moved` bytes together."""
    source = torch.randint(256, (moved // 2,), device=DEVICE, dtype=torch.uint8)
    target = torch.empty_like(source)
    return replayed(lambda: target.copy_(source))


def check(kernel: Kernel) -> None:
    """Raise an AssertionError unless the bytes are the reference's."""
    for found, required in zip(flat(kernel.run()), flat(kernel.reference()), strict=False):
        if found.element_size() == 1 or found.dtype == torch.int32:
            wrong = int((found.view(torch.uint8) != required.view(torch.uint8)).sum())
            assert wrong == 0, f"{kernel.name}: {wrong} of {found.numel()} bytes are not the reference's"


def flat(result: Any) -> Iterator[Tensor]:
    """The tensors of a result, in order."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple):
        for part in result:
            yield from flat(part)
    else:
        yield result.data
        yield result.scale


def bits(rotation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The bits of BF16 numbers, two in an integer, which `check` compares."""
    return rotation(x).view(torch.int32)


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def kernels(k: int) -> Iterator[Kernel]:
    """The kernels on tensors [8192, k]."""
    x_cast, dy_cast = ROW_X, Cast(scale="pow2")
    x, n = bf16(T, k), T * k
    for seed in (None, torch.tensor(2**40 + 1, device=DEVICE)):
        yield from quantizations(x, dy_cast, seed)
    yield Kernel("rotate", partial(bits, ops.rotate, x), partial(bits, rotate_reference, x), n, 4)
    q = ops.quantize(x, x_cast)
    shift = torch.randint(0, 4, (T,), device=DEVICE, dtype=torch.int32)
    for name, places in (("transpose", None), ("transpose, exponents shifted", shift)):
        yield Kernel(
            name,
            partial(ops.transpose, q.data, places),
            partial(transpose_reference, q.data, places),
            n, 2,
        )  # fmt: skip
    yield Kernel(
        "cast again, transposed",
        partial(ops.requantize_transposed, [x], q.scale, x_cast),
        partial(requantize_transposed_reference, [x], q.scale, x_cast.fmt, x_cast.granularity),
        n, 3,
    )  # fmt: skip
    if k == 4096:
        yield from norms(x, x_cast)
    if k == 14336:
        yield from activations(k, x_cast, dy_cast)


def quantizations(x: Tensor, dy_cast: Cast, seed: Tensor | None) -> Iterator[Kernel]:
    """The quantizations of x: to nearest, or stochastically with a seed."""
    rounding, tensor = "" if seed is None else ", stochastic", Cast(granularity=TENSOR)
    column, row = torch.rand(1, x.shape[1], device=DEVICE) + 0.5, torch.rand(T, 1, device=DEVICE) + 1
    scale = x.abs().amax().float().view(1, 1) / 448
    for name, cast, columns, rows in (
        ("rows", ROW_X, None, None),
        ("rows, floor (weights)", ROW_W, None, None),
        ("rows, factors (dy)", dy_cast, column, row),
        ("1x128", BLOCK_X, None, None),
        ("MX", MX_GROUPS, None, None),
        ("128x128", BLOCK_W, None, None),
        ("tensor", tensor, None, None),
    ):
        yield Kernel(
            f"quantize {name}{rounding}",
            partial(torch.ops.octavo.quantize, x, cast.spec, columns, rows, seed),
            partial(quantize_reference, x, cast, columns, rows, seed),
            x.numel(), 5 if cast == tensor else 3,
        )  # fmt: skip
    yield Kernel(
        f"quantize tensor, known scale{rounding}",
        partial(torch.ops.octavo.quantize_scaled, x, scale, tensor.format, seed),
        partial(quantize_scaled_reference, x, scale, tensor.fmt, seed),
        x.numel(), 3,
    )  # fmt: skip
    for name, cast in (("1x128", BLOCK_X), ("MX", MX_GROUPS)):
        yield Kernel(
            f"quantize {name}, transposed{rounding}",
            partial(torch.ops.octavo.quantize_transposed, x, cast.spec, seed),
            partial(quantize_reference, x.t().contiguous(), cast, None, None, seed),
            x.numel(), 3,
        )  # fmt: skip


def norms(x: Tensor, cast: Cast) -> Iterator[Kernel]:
    residual, weight, bias = bf16(*x.shape), bf16(x.shape[1]), bf16(x.shape[1])
    for name, center, beta in (("RMS norm", False, None), ("layer norm", True, bias)):
        run = partial(norm, x, residual, weight, beta, cast, center)
        reference = partial(norm_quantize_reference, x, residual, weight, beta, 1e-5, cast, center)
        yield Kernel(f"{name} + residual + quantize", run, reference, x.numel(), 7)
        total, _, scale, mean, rstd = run()
        subtracted = mean if center else None
        yield Kernel(
            f"{name}, cast again, transposed",
            partial(ops.requantize_norm, total, subtracted, rstd, weight, beta, scale, cast),
            partial(requantize_norm_reference, total, subtracted, rstd, weight, beta, scale, cast.fmt),
            x.numel(), 3,
        )  # fmt: skip
        yield Kernel(
            f"{name} + residual, backward",
            partial(ops.norm_backward, x, residual, weight, mean, rstd, x, center=center),
            tuple,
            x.numel(), 8,
        )  # fmt: skip


def norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, cast: Cast, center: bool) -> Any:
    normed = ops.norm_quantize(x, residual, weight, bias, 1e-5, cast, center=center)
    return normed.total, normed.output.data, normed.output.scale, normed.mean, normed.rstd


def activation_gradient(
    dh: Tensor, u: Tensor, kind: str, cast: Cast, column: Tensor, row: Tensor, h_cast: Cast, h_scale: Tensor
) -> Any:
    factors = {"column_scale": column, "row_scale": row}
    du, h, _ = ops.activation_backward(dh, u, kind, cast, **factors, h_cast=h_cast, h_scale=h_scale, biased=False)
    return du.data, du.scale, h.data


def activations(f: int, cast: Cast, dy_cast: Cast) -> Iterator[Kernel]:
    dh = bf16(T, f)
    for kind, width in (("swiglu", 2), ("gelu", 1)):
        u = bf16(T, width * f)
        column, row = torch.rand(1, width * f, device=DEVICE) + 0.5, torch.rand(T, 1, device=DEVICE) + 1
        h = ops.activation_quantize(u, kind, cast)

        backward = partial(activation_gradient, dh, u, kind, dy_cast, column, row, cast, h.scale)
        reference = partial(activation_backward_reference, dh, u, kind, dy_cast, column, row, cast, h.scale, False)
        yield Kernel(
            f"{kind} + quantize",
            partial(ops.activation_quantize, u, kind, cast),
            partial(activation_quantize_reference, u, kind, cast),
            T * f, 2 * width + 1,
        )  # fmt: skip
        yield Kernel(f"{kind} + quantize, backward", backward, reference, T * f, 2 * width + 2 + width + 1)


if __name__ == "__main__":
    main()
