"""Our grouped GEMMs of row scales on CUDA, against float64 on the same quantized operands, judged on the worst row.

The bounds are those of PyTorch's kernel (`test_grouped_gemm_gpu`), which takes two E4M3 operands on a Hopper.
"""

import numpy as np
import pytest
import torch
from gemm_examples import on_gpu, row_norm
from gpu_memory import no_waits, poison
from grouped_examples import exact, exact_dw, gradient_operands, offsets_of, operands
from grouped_examples import row_error_bound as bound
from hopper import ONLY_HOPPER

from octavo.nn import GroupedLinear
from octavo.numerics import FORMATS, QTensor
from octavo.ops import find_grouped_backend, grouped_mm, grouped_mm_dw
from octavo.recipe import rowwise

pytestmark = [pytest.mark.gpu, ONLY_HOPPER]

SIZES = [[7, 0, 33, 16, 1], [257, 0, 0, 129], [1, 1, 1], [1000, 24, 1024, 2048]]
ALIGNED = [[16, 0, 48, 16, 272], [0, 0, 640], [1008, 32, 1024, 2048]]
TILINGS = [(64, 16, 4, 4), (64, 64, 4, 4), (64, 128, 3, 4), (128, 128, 3, 8), (128, 256, 4, 8), (256, 128, 4, 8)]
FAST = pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
EACH_TILING = pytest.mark.parametrize("tiling", TILINGS, ids=str)


def product(a, b, offsets, dtype, fast, tiling=()):
    from octavo.ops.kernels import grouped_gemm as kernel

    how = kernel.Tiling(*tiling) if tiling else None
    poison()
    return kernel.grouped_mm(a.data, a.scale, b.data, b.scale, offsets.cuda(), dtype, fast, how)


def check(sizes, k, n, pair, dtype, fast, tiling=()):
    a, b, offsets = operands(sizes, k, n, spare=3, pair=pair)
    rows, (wide, squares) = sum(sizes), (exact(a, b, sizes, power) for power in (1, 2))
    gpu_a, gpu_b = on_gpu(a), on_gpu(b)
    turned = gpu_b.data.view(torch.uint8).transpose(0, 1).contiguous().transpose(0, 1).view(gpu_b.data.dtype)
    y = product(gpu_a, gpu_b, offsets, dtype, fast, tiling)
    assert (y.shape, y.dtype) == ((rows + 3, n), dtype)
    error, largest = row_norm(y.cpu().double().numpy() - wide)[:rows], bound(wide, np.sqrt(squares), k, fast)[:rows]
    assert (error <= largest).all(), (error / largest).max()
    other = product(gpu_a, QTensor(turned, gpu_b.scale, b.format, b.granularity), offsets, dtype, fast, tiling)
    assert torch.equal(other[:rows], y[:rows])


@FAST
@pytest.mark.parametrize(("k", "n", "dtype"), [(48, 80, torch.float32), (512, 1024, torch.bfloat16)])
@pytest.mark.parametrize("pair", ["row", "row-e5m2"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_worst_row(sizes, pair, k, n, dtype, fast):
    check(sizes, k, n, pair, dtype, fast)


@FAST
@EACH_TILING
def test_worst_row_of_each_tiling(tiling, fast):
    check(SIZES[-1], 528, 272, "row-e5m2", torch.bfloat16, fast, tiling)


def check_gradients(dw, h, scale, x_t, sizes, fast):
    wide = exact_dw(h, scale, x_t, sizes)
    squares = exact_dw(h.double().square(), scale.square(), x_t.double().square(), sizes)
    for e, size in enumerate(sizes):
        error = row_norm(dw[e].cpu().double().numpy() - wide[e])
        assert (error <= bound(wide[e], np.sqrt(squares[e]), size, fast)).all()
        assert size or not dw[e].any()


def gradient(h, scale, x_t, offsets, dtype, fast, tiling=()):
    from octavo.ops.kernels import grouped_gemm as kernel

    how = kernel.Tiling(*tiling) if tiling else None
    poison()
    return kernel.grouped_mm_dw(h.cuda(), scale.cuda(), x_t.cuda(), offsets.cuda(), dtype, fast, how)


@FAST
@pytest.mark.parametrize("formats", [("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e4m3", "e4m3")], ids=str)
@pytest.mark.parametrize("sizes", ALIGNED, ids=str)
def test_gradients_of_groups_and_of_empty_ones(sizes, formats, fast):
    h, scale, x_t, offsets = gradient_operands(sizes, formats)
    for dtype in (torch.bfloat16, torch.float32):
        dw = gradient(h, scale, x_t, offsets, dtype, fast)
        assert (dw.shape, dw.dtype) == ((len(sizes), 96, 80), dtype)
        check_gradients(dw, h, scale, x_t, sizes, fast)


@FAST
@EACH_TILING
def test_gradients_of_each_tiling(tiling, fast):
    h, scale, x_t, offsets = gradient_operands(ALIGNED[-1], ("e5m2", "e4m3"), 272, 528)
    check_gradients(gradient(h, scale, x_t, offsets, torch.bfloat16, fast, tiling), h, scale, x_t, ALIGNED[-1], fast)


@FAST
def test_sums_are_as_near_as_pytorchs(fast):
    """Of products of one sign, where the tensor cores' sums lose the most."""
    sizes, n, k = [4096, 2048], 256, 512
    h, x_t = (torch.rand(size, sum(sizes)).to(torch.float8_e4m3fn) for size in (n, k))
    scale, offsets = torch.ones(2, n, 1), offsets_of(sizes)
    wide = exact_dw(h, scale, x_t, sizes)
    theirs = grouped_mm_dw(h.cuda(), scale.cuda(), x_t.cuda(), offsets.cuda(), fast_accumulation=fast)
    ours = gradient(h, scale, x_t, offsets, torch.bfloat16, fast)
    error, other = (
        np.linalg.norm(each.cpu().double().numpy() - wide) / np.linalg.norm(wide) for each in (ours, theirs)
    )
    assert error <= 1.25 * other + 2.0**-10
    assert fast or error < 2.0**-8


@pytest.mark.parametrize("formats", [("e5m2", "e4m3"), ("e4m3", "e5m2")], ids=str)
def test_the_operations_run_e5m2_by_it(formats):
    sizes = [16, 0, 48]
    a, b, offsets = operands(sizes, 64, 48, pair="row-e5m2" if formats[0] == "e5m2" else "row")
    if formats[1] == "e5m2":
        b = QTensor(b.data.float().to(torch.float8_e5m2), b.scale, FORMATS["e5m2"], b.granularity)
    gpu_a, gpu_b, gpu_offsets = on_gpu(a), on_gpu(b), offsets.cuda()
    assert find_grouped_backend(gpu_offsets.device, formats).name == "triton"
    y = grouped_mm(gpu_a, gpu_b, gpu_offsets, out_dtype=torch.float32)
    wide, squares = (exact(a, b, sizes, power) for power in (1, 2))
    assert (row_norm(y.cpu().double().numpy() - wide) <= bound(wide, np.sqrt(squares), 64, False)).all()
    with no_waits():
        grouped_mm(gpu_a, gpu_b, gpu_offsets)
    h, scale, x_t, offsets = gradient_operands(sizes, formats)
    dw = grouped_mm_dw(h.cuda(), scale.cuda(), x_t.cuda(), offsets.cuda(), formats=formats, out_dtype=torch.float32)
    check_gradients(dw, h, scale, x_t, sizes, False)


def test_a_layer_with_e5m2_gradients_is_near_that_with_e4m3():
    """E5M2 has one bit of the mantissa less: twice the error of the gradients."""
    torch.manual_seed(0)
    layer = GroupedLinear(3, 512, 256).cuda()
    x = torch.randn(640, 512, device="cuda", requires_grad=True)
    dy, offsets = torch.randn(640, 256, device="cuda"), torch.tensor([100, 100, 640], dtype=torch.int32).cuda()
    found = {}
    for name, recipe in {"bf16": None, "e4m3": rowwise(), "e5m2": rowwise("e5m2")}.items():
        layer.recipe, x.grad, layer.weight.grad = recipe, None, None
        with torch.autocast("cuda", torch.bfloat16):
            y = layer(x, offsets)
        y.backward(dy.to(y.dtype))
        found[name] = y.detach(), x.grad, layer.weight.grad
    exact_ones = found.pop("bf16")
    errors = {
        name: [float((t - other).norm() / other.norm()) for t, other in zip(each, exact_ones, strict=True)]
        for name, each in found.items()
    }
    assert errors["e4m3"][0] == errors["e5m2"][0]
    for of_e4m3, of_e5m2 in zip(errors["e4m3"][1:], errors["e5m2"][1:], strict=True):
        assert of_e4m3 < of_e5m2 < 2.5 * of_e4m3 < 0.15
