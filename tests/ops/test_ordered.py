"""Products and attention whose rows depend on no other row: the references and, in the interpreter, the kernels."""

import pytest
import torch
from attention_oracle import attention64, given
from gemm_examples import operands, wide

from octavo.ops.attention import ordered_attention
from octavo.ops.launching import Cache


@pytest.fixture(params=["reference", pytest.param("kernel", marks=pytest.mark.triton)])
def run(request):
    """run(function, *values) calls the function with False here, or with True where kernels are interpreted."""
    if request.param == "reference":
        return lambda function, *values: torch.from_numpy(function(False, *values))
    pool = request.getfixturevalue("kernels")
    return lambda function, *values: torch.from_numpy(pool.submit(function, True, *values).result())


def is_interpreted(request):
    """True for kernels. The sums of the interpreter depend on the place of a row in its tile."""
    return "kernel" in request.node.callspec.id


def matrices(m, k, n, fp8):
    if fp8:
        return operands("row", m, k, n)
    torch.manual_seed(m)
    return torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()


def product(kernel, m, k, n, fp8, rows):
    """Some rows of a product [m, n] with a bias and a residual of ones, computed by themselves.

    The kernel takes float16 in place of BF16, whose products the interpreter computes wrongly.
    """
    a, b = matrices(m, k, n, fp8)
    call = torch.ops.octavo.ordered_mm
    if kernel:
        from octavo.ops.kernels.gemm import ordered_mm as call

        a, b = (a, b) if fp8 else (a.half(), b.half())
    data = (a.data[rows], b.data, a.scale[rows], b.scale) if fp8 else (a[rows], b, None, None)
    return call(*data, torch.ones(n).bfloat16(), torch.ones(m, n).bfloat16()[rows]).float().numpy()


@pytest.mark.parametrize("fp8", [True, False], ids=["e4m3", "bf16"])
@pytest.mark.parametrize(("m", "k", "n"), [(5, 32, 16), (70, 208, 130)])
def test_products_against_float64(run, request, m, k, n, fp8):
    a, b = matrices(m, k, n, fp8)
    y = run(product, m, k, n, fp8, slice(None))
    exact = (wide(a) @ wide(b).T if fp8 else a.double().numpy() @ b.double().numpy().T) + 2
    assert y.shape == (m, n)
    # A product is rounded to BF16 before the residual is added, and after. The interpreter cuts off in place of that.
    bound = 2**-6 if is_interpreted(request) else 2**-7
    torch.testing.assert_close(y.double(), torch.from_numpy(exact), rtol=bound, atol=bound)
    for rows in () if is_interpreted(request) else (slice(1), slice(m - 3, m)):
        assert torch.equal(run(product, m, k, n, fp8, rows), y[rows])


def keys_of(room):
    torch.manual_seed(0)
    q, keys, values, *_ = given("bf16", 2, 4, 2, room, 24, room)
    return q, keys, values


def attention(kernel, room, queries, first):
    """The attention of some queries of two texts of `room` tokens, as a prompt's or a step's over a longer cache."""
    q, keys, values = keys_of(room)
    places = None if first is None else torch.tensor(first, dtype=torch.int32)
    length = torch.tensor(queries.stop)
    if not kernel:
        return ordered_attention(q[:, :, queries], keys, values, length, first=places).float().numpy()
    from octavo.ops.kernels import attention as kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "shared_memory", lambda device: 1 << 17)
        patch.setattr(kernels, "PART", 64)  # several of a short text
        patch.setattr(kernels, "MOST", 40_000)  # in pieces
        cache = Cache(keys.half(), values.half(), None, None, length)
        return kernels.ordered_attention(q[:, :, queries].half(), cache, places, 24**-0.5).float().numpy()


@pytest.mark.parametrize("first", [None, [0, 70]], ids=["whole", "padded"])
def test_attention_against_float64(run, request, first):
    q, keys, values = keys_of(192)
    y = run(attention, 192, slice(0, 192), first)
    exact, size = attention64(q, keys, values, None, None, 192, first, 24**-0.5)
    assert ((y.double() - exact).abs() <= 2**-7 * size).all()
    for start, stop in ((0, 64), (64, 128), (128, 192), (149, 150), (64, 65), (100, 131)):
        if not is_interpreted(request) or (start % 64, stop % 64) == (0, 0):
            assert torch.equal(run(attention, 192, slice(start, stop), first), y[:, :, start:stop])


def test_a_cache_without_room_gives_nan(run):
    assert run(attention, 192, slice(0, 193), None).isnan().all()
