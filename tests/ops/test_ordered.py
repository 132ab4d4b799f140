"""Products and attention whose rows depend on no other row: the references and, in the interpreter, the kernels."""

from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

import pytest
import torch
from attention_oracle import attention64, given
from gemm_examples import operands, wide
from interpreted_triton import interpreter
from torch import Tensor

from octavo.ops.attention import ordered_attention
from octavo.ops.gemm import ordered_mm
from octavo.ops.launching import Cache

BY = ["reference", pytest.param("kernel", marks=pytest.mark.triton)]


@pytest.fixture(scope="module")
def kernels() -> Iterator[Executor]:
    pytest.importorskip("triton")
    with interpreter() as pool:
        yield pool


@pytest.fixture(params=BY)
def run(request: Any) -> Any:
    """run(by_reference, by_kernel, *arguments), one of them."""
    if request.param == "reference":
        return lambda by_reference, by_kernel, *values: by_reference(*values)
    pool = request.getfixturevalue("kernels")
    return lambda by_reference, by_kernel, *values: torch.from_numpy(pool.submit(by_kernel, *values).result())


def matrices(m: int, k: int, n: int, fp8: bool) -> tuple[Any, Any]:
    if fp8:
        return operands("row", m, k, n)
    torch.manual_seed(m)
    return torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()


def product(m: int, k: int, n: int, fp8: bool, rows: slice) -> Tensor:
    """Some rows of a product [m, n] with a bias and a residual, computed by themselves."""
    a, b = matrices(m, k, n, fp8)
    data = (a.data[rows], b.data, a.scale[rows], b.scale) if fp8 else (a[rows], b, None, None)
    return torch.ops.octavo.ordered_mm(*data, torch.ones(n).bfloat16(), torch.ones(m, n).bfloat16()[rows]).float()


def product_by_kernel(m: int, k: int, n: int, fp8: bool, rows: slice) -> Any:
    """In float16 in place of BF16, whose products the interpreter computes wrongly."""
    from octavo.ops.kernels.gemm import ordered_mm as kernel

    a, b = matrices(m, k, n, fp8)
    data = (a.data[rows], b.data, a.scale[rows], b.scale) if fp8 else (a[rows].half(), b.half(), None, None)
    return kernel(*data, torch.ones(n).bfloat16(), torch.ones(m, n).bfloat16()[rows]).float().numpy()


@pytest.mark.parametrize("fp8", [True, False], ids=["e4m3", "bf16"])
@pytest.mark.parametrize(("m", "k", "n"), [(5, 32, 16), (70, 208, 130)])
def test_products_against_float64(run, request, m, k, n, fp8):
    a, b = matrices(m, k, n, fp8)
    y = run(product, product_by_kernel, m, k, n, fp8, slice(None))
    exact = (wide(a) @ wide(b).T if fp8 else a.double().numpy() @ b.double().numpy().T) + 2
    assert y.shape == (m, n)
    # The bias and the residual are 1. A product is rounded to BF16 before the residual is added, and after; the
    # interpreter cuts off in place of rounding.
    interpreted = "kernel" in request.node.callspec.id
    bound = 2**-6 if interpreted else 2**-7
    torch.testing.assert_close(y.double(), torch.from_numpy(exact), rtol=bound, atol=bound)
    for rows in (slice(1), slice(m - 3, m)) if not interpreted else ():  # its sums depend on the place in a tile
        assert torch.equal(run(product, product_by_kernel, m, k, n, fp8, rows), y[rows])


def test_products_of_e4m3_are_exact_in_any_order():
    a, b = operands("row", 4, 1 << 12, 8)
    order = torch.randperm(1 << 12)
    y, turned = (torch.ops.octavo.ordered_mm(x, w, a.scale, b.scale, None, None)
                 for x, w in ((a.data, b.data), (shuffled(a.data, order), shuffled(b.data, order))))  # fmt: skip
    assert torch.equal(y, turned)
    assert torch.equal(ordered_mm(a, b), y)


def shuffled(data: Tensor, order: Tensor) -> Tensor:
    return data.view(torch.uint8)[:, order].view(data.dtype)


def keys_of(batch: int, room: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, keys, values, *_ = given("bf16", batch, 4, 2, room, 24, room)
    return q, keys, values


def attention(batch: int, room: int, queries: slice, first: list[int] | None) -> Tensor:
    """The attention of some queries of a text of `room` tokens, as a prompt's or a step's over a longer cache."""
    q, keys, values = keys_of(batch, room)
    places = None if first is None else torch.tensor(first, dtype=torch.int32)
    return ordered_attention(q[:, :, queries], keys, values, torch.tensor(queries.stop), first=places).float()


def attention_by_kernel(batch: int, room: int, queries: slice, first: list[int] | None) -> Any:
    from octavo.ops.kernels import attention as kernel

    q, keys, values = (x.half() for x in keys_of(batch, room))
    places = None if first is None else torch.tensor(first, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "shared_memory", lambda device: 1 << 17)
        patch.setattr(kernel, "PART", 64)  # of shorter texts too
        patch.setattr(kernel, "MOST", 40_000)  # in pieces
        cache = Cache(keys, values, None, None, torch.tensor(queries.stop))
        return kernel.ordered_attention(q[:, :, queries], cache, places, 24**-0.5).float().numpy()


@pytest.mark.parametrize("first", [None, [0, 70]], ids=["whole", "padded"])
def test_attention_against_float64(run, request, first):
    q, keys, values = keys_of(2, 192)
    y = run(attention, attention_by_kernel, 2, 192, slice(0, 192), first)
    exact, size = attention64(q, keys, values, None, None, 192, first, 24**-0.5)
    assert ((y.double() - exact).abs() <= 2**-7 * size).all()
    places = [(0, 64), (64, 128), (128, 192)]  # in the interpreter, sums depend on the place in a tile
    for start, stop in places if "kernel" in request.node.callspec.id else [*places, (149, 150), (64, 65), (100, 131)]:
        assert torch.equal(run(attention, attention_by_kernel, 2, 192, slice(start, stop), first), y[:, :, start:stop])
