"""The weight-only GEMM on CUDA against float64, for every path of its kernels.

E4M3 is widened by the GPU's own conversion, and by the integer instructions of older GPUs, which newer ones run too.
"""

import pytest
import torch
import weight_only_examples as examples
from gemm_examples import on_gpu
from gpus import no_waits, poison, replayed, tiled

from octavo.numerics import QTensor
from octavo.ops import grouped_weight_only_mm, weight_only_mm
from octavo.ops.dispatch import MAX_M, MAX_MEAN_ROWS
from octavo.ops.launching import Around, has_kernels

pytestmark = pytest.mark.gpu

# k, n: no multiples of a tile, shorter than one, long enough to be cut, of Llama-3-8B
SIZES = [(32, 16), (160, 515), (1056, 77), (14336, 512), (4096, 6144)]


def ways() -> list[bool]:
    return [False, True] if has_kernels(torch.device("cuda")) else [False]


def product(x, w: QTensor, bias=None, residual=None, tiling=(), native: bool | None = None):
    from octavo.ops.kernels import weight_only as kernel

    poison()
    with tiled(kernel, tiling):
        return kernel.weight_only_mm(x, w.data, w.scale, w.granularity, bias, residual, Around(), native)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_all_256_codes(dtype, native):
    """x is the unit matrix, so that y is the widened weight, by the row kernel and by tiles."""
    from octavo.ops.kernels import weight_only as kernel

    if native not in ways():
        pytest.skip("this GPU does not convert E4M3")
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(2)
    w, one = codes.view(torch.float8_e4m3fn), torch.ones(1, 1, device="cuda")
    expected = w.float().to(dtype)
    by = examples.CASTS["tensor"].granularity
    x = torch.ones(1, 1, dtype=dtype, device="cuda")
    y = kernel.weight_only_mm(x, w.view(-1, 1), one, by, None, None, Around(), native=native)
    assert torch.equal(y[0].nan_to_num(999), expected.nan_to_num(999))
    x = torch.cat([torch.eye(1, 64), torch.zeros(15, 64)]).to("cuda", dtype)
    columns = torch.zeros(512, 64, dtype=torch.uint8, device="cuda")
    columns[:, 0] = codes
    y = kernel.weight_only_mm(x, columns.view(w.dtype), one, by, None, None, Around(), native=native)
    assert torch.equal(y[0].nan_to_num(999), expected.nan_to_num(999))
    assert torch.equal(y[1:].isnan(), expected.isnan().expand(15, -1))
    wide = kernel.dequantize(w.view(2, 256), one, by, dtype, native=native)
    assert torch.equal(wide.flatten().nan_to_num(999), expected.nan_to_num(999))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("cast", "biased", "normed", "gated"), examples.ROWS)
@pytest.mark.parametrize(("k", "n"), SIZES, ids=str)
def test_one_row_with_its_norm_and_its_activation(k, n, cast, biased, normed, gated, dtype):
    from octavo.ops.kernels import weight_only as kernel

    x, w, bias, norm = examples.row_operands(cast, k, n // 2 * 2, dtype, biased, normed)
    packed, (x_gpu, bias_gpu, norm_gpu) = on_gpu(w), (None if t is None else t.cuda() for t in (x, bias, norm))
    for native in ways():
        poison()
        given = x_gpu, packed.data, packed.scale, packed.granularity, bias_gpu, None, Around(norm_gpu, 0.1, gated)
        examples.assert_close_row(kernel.weight_only_mm(*given, native=native), x, w, bias, norm, 0.1, gated)


GIVEN = [  # a cast, m, k, n and the dtype of x
    *(("row", m, *size, torch.bfloat16) for size in SIZES for m in (1, 2, 16, 33, 128, 200)),
    *((cast, m, 1056 if cast != "block" else 1000, 515, torch.float16) for cast in examples.CASTS for m in (1, 5, 64)),
]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_every_element_with_bias_and_residual(given):
    *_, m, _, n, dtype = given
    x, w = examples.operands(*given)
    bias, residual = torch.randn(n).to(dtype), torch.randn(m, n).to("cuda", dtype)
    for native in ways():
        y = product(x.cuda(), on_gpu(w), native=native)
        assert (y.shape, y.dtype, y.is_contiguous()) == ((m, n), dtype, True)
        examples.assert_close(y, x, w)
        assert torch.equal(product(x.cuda(), on_gpu(w), native=native), y)
        y = product(x.cuda(), on_gpu(w), bias.cuda(), native=native)
        examples.assert_close(y, x, w, bias)
        assert torch.equal(product(x.cuda(), on_gpu(w), bias.cuda(), residual, native=native), y + residual)


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_every_way_to_cut_it_up(splits):
    for cast, m, k in (("row", 16, 1056), ("row", 33, 14336), ("group32", 5, 4096)):
        x, w = examples.operands(cast, m, k, 515)
        tiling = (64, 32 if cast == "group32" else 128, 3, 4, splits)
        examples.assert_close(product(x.cuda(), on_gpu(w), tiling=tiling), x, w)


@pytest.mark.parametrize("cast", examples.CASTS)
def test_dequantize(cast):
    from octavo.ops.kernels import weight_only as kernel

    _, w = examples.operands(cast, 1, 1056 if cast != "block" else 1000, 515)
    for native in ways():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            poison()
            wide = kernel.dequantize(w.data.cuda(), w.scale.cuda(), w.granularity, dtype, native=native)
            assert torch.equal(wide.cpu(), w.dequantize().to(dtype))


@pytest.mark.parametrize("sizes", [[7, 0, 33, 16, 1], [0, 0, 300], [1, 1, 1], [129, 0, 64]], ids=str)
@pytest.mark.parametrize("cast", examples.GROUPED_CASTS)
def test_every_element_of_groups_of_rows(cast, sizes):
    from octavo.ops.kernels import grouped_gemm as kernel

    x, w, offsets = examples.grouped_operands(cast, sizes, 1056 if cast != "block" else 1000, 515, torch.float16)
    on_device = x.cuda(), w.data.cuda(), w.scale.cuda(), w.granularity, offsets.cuda()
    for native in ways():
        poison()
        y = kernel.grouped_weight_only_mm(*on_device, native=native)
        assert (y.shape, y.dtype, y.is_contiguous()) == ((sum(sizes) + 3, 515), torch.float16, True)
        examples.assert_close_in_groups(y, x, w, sizes)
        assert torch.equal(kernel.grouped_weight_only_mm(*on_device, native=native)[:-3], y[:-3])
    with no_waits():
        grouped_weight_only_mm(on_device[0], QTensor(*on_device[1:3], w.format, w.granularity), on_device[4])


@pytest.mark.parametrize("cast", ["row", "block", "mx"])
def test_many_rows_of_groups_multiply_the_widened_weight(cast):
    sizes = [MAX_MEAN_ROWS + 200, MAX_MEAN_ROWS - 100]
    x, w, offsets = examples.grouped_operands(cast, sizes, 256, 384)
    poison()
    y = grouped_weight_only_mm(x.cuda(), on_gpu(w), offsets.cuda())
    examples.assert_close_in_groups(y, x, w, sizes, rounded_weight=True)


@pytest.mark.parametrize("m", [1, MAX_M, MAX_M + 1])
def test_the_operation_eager_compiled_and_in_a_graph(m):
    torch.compiler.reset()
    x, w = examples.operands("row", m, 4096, 512)
    on_device, packed = x.cuda(), on_gpu(w)
    y = weight_only_mm(on_device, packed)
    examples.assert_close(y, x, w, rounded_weight=m > MAX_M)
    assert torch.equal(torch.compile(lambda x: weight_only_mm(x, packed), fullgraph=True)(on_device), y)
    assert torch.equal(replayed(lambda: weight_only_mm(on_device, packed)), y)
