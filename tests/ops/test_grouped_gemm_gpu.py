"""The grouped GEMMs of a Hopper against float64 on the same quantized operands, judged by row (`test_gemm_gpu`).

Our kernels of row scales have the bounds of PyTorch's, which takes two E4M3 operands.
"""

import grouped_examples as examples
import numpy as np
import pytest
import torch
from gemm_examples import on_gpu, row_norm, wide, wide_in_bf16
from gpus import ONLY_HOPPER, no_waits, poison, tiled

from octavo.nn import GroupedLinear
from octavo.numerics import ROW, QTensor
from octavo.ops import aligned_groups, find_grouped_backend, grouped_mm, grouped_mm_dw, launching, transpose
from octavo.ops import dispatch as backend
from octavo.ops.launching import Operands
from octavo.recipe import rowwise

pytestmark = [pytest.mark.gpu, ONLY_HOPPER]

SIZES = [[7, 0, 33, 16, 1], [0, 0, 640], [257, 0, 0, 129], [1, 1, 1], [1000, 24, 1024, 2048]]
SPARE = 3  # rows behind the groups


def check(y, a, b, sizes, fast=False, widen=wide):
    """The error of each row of a group is within its bound."""
    rows, (product, squares) = sum(sizes), (examples.exact(a, b, sizes, power, widen) for power in (1, 2))
    bound = examples.row_error_bound(product, np.sqrt(squares), a.shape[1], fast)[:rows]
    error = row_norm(y[:rows].cpu().double().numpy() - product[:rows])
    assert (error <= bound).all(), (error / bound).max()


def check_gradients(dw, h, scale, x_t, sizes, fast):
    product = examples.exact_dw(h, scale, x_t, sizes)
    squares = examples.exact_dw(h.double().square(), scale.square(), x_t.double().square(), sizes)
    for e, size in enumerate(sizes):
        error = row_norm(dw[e].cpu().double().numpy() - product[e])
        assert (error <= examples.row_error_bound(product[e], np.sqrt(squares[e]), size, fast)).all()
        assert size or not dw[e].any()


@pytest.fixture(params=["promoted by CUTLASS", "promoted", "fast"])
def fast(request, monkeypatch) -> bool:
    """True if sums are fast. PyTorch's kernel or ours computes promoted ones, for all numbers of rows."""
    monkeypatch.setattr(launching, "_recorded", {})
    for limit in ("CUTLASS_ROWS", "CUTLASS_ROWS_OF_WIDE"):
        monkeypatch.setattr(backend, limit, -1 if "CUTLASS" in request.param else 1 << 30)
    return request.param == "fast"


@pytest.mark.parametrize(("k", "n"), [(16, 16), (48, 80), (512, 1024)])
@pytest.mark.parametrize("pair", ["row", "row-e5m2"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_worst_row(sizes, pair, k, n, fast):
    a, b, offsets = examples.operands(sizes, k, n, SPARE, pair)
    gpu_a, gpu_b, rows = on_gpu(a), on_gpu(b), sum(sizes)
    turned = gpu_b.data.view(torch.uint8).transpose(0, 1).contiguous().transpose(0, 1).view(gpu_b.data.dtype)
    for dtype in (torch.bfloat16, torch.float32):
        poison()
        y = grouped_mm(gpu_a, gpu_b, offsets.cuda(), fast_accumulation=fast, out_dtype=dtype)
        assert (y.shape, y.dtype) == ((rows + SPARE, n), dtype)
        check(y, a, b, sizes, fast)
        for data in (gpu_b.data, turned):
            poison()
            again = QTensor(data, gpu_b.scale, b.format, b.granularity)
            other = grouped_mm(gpu_a, again, offsets.cuda(), fast_accumulation=fast, out_dtype=dtype)
            assert torch.equal(other[:rows], y[:rows])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_of_ragged_groups(sizes, fast):
    n, k, rows = 96, 64, sum(sizes)
    g, x = (torch.randn(rows, columns).to(torch.float8_e4m3fn) for columns in (n, k))
    scale = torch.rand(len(sizes), n, 1) + 0.1
    _, ends, place, _ = aligned_groups(examples.offsets_of(sizes).cuda(), rows)
    h, x_t = transpose(g.cuda(), place=place), transpose(x.cuda(), place=place)
    poison()
    dw = grouped_mm_dw(h, scale.cuda(), x_t, ends, fast_accumulation=fast)
    check_gradients(dw, g.t(), scale, x.t(), sizes, fast)


@pytest.mark.parametrize("pair", ["strip-strip", "group64", "group64-e5m2", "mx"])
@pytest.mark.parametrize("sizes", [[128, 0, 256, 128], [0, 640], [1024, 128, 1920, 1024], [2048, 1024]], ids=str)
def test_gradients_of_scales_along_the_rows_of_groups(sizes, pair):
    """Groups smaller than 128 run as a BF16 product where there are many rows: it multiplies operands in BF16."""
    a, b, offsets = examples.quantized_columns(sizes, pair, 272, 528)
    in_bf16 = not pair.startswith("strip") and sum(sizes) > backend.MAX_MEAN_ROWS * len(sizes)
    widen = wide_in_bf16 if in_bf16 else wide
    product, squares = (examples.exact_columns(a, b, sizes, power, widen) for power in (1, 2))
    gpu_a, gpu_b = on_gpu(a), on_gpu(b)
    for dtype in (torch.bfloat16, torch.float32):
        options = {"scale_b": gpu_b.scale, "granularity": b.granularity, "out_dtype": dtype}
        poison()
        dw = grouped_mm_dw(gpu_a.data, gpu_a.scale, gpu_b.data, offsets.cuda(), **options)
        assert (dw.shape, dw.dtype) == ((len(sizes), 272, 528), dtype)
        for e, size in enumerate(sizes):
            error = row_norm(dw[e].cpu().double().numpy() - product[e])
            assert (error <= examples.row_error_bound(product[e], np.sqrt(squares[e]), size, fast=False)).all()
            assert size or not dw[e].any()


@pytest.mark.parametrize("pair", examples.GROUPED_PAIRS[1:])
@pytest.mark.parametrize(("k", "n"), [(48, 80), (512, 272)])
@pytest.mark.parametrize("sizes", [*SIZES, [backend.MAX_MEAN_ROWS + 300, backend.MAX_MEAN_ROWS - 200]], ids=str)
def test_worst_row_of_scales_along_k(sizes, k, n, pair):
    """Groups smaller than 128 run as a BF16 product where there are many rows: it multiplies operands in BF16."""
    a, b, offsets = examples.operands(sizes, k, n, SPARE, pair)
    in_bf16 = not pair.startswith("strip") and a.shape[0] > backend.MAX_MEAN_ROWS * len(sizes)
    gpu_a, gpu_b, rows = on_gpu(a), on_gpu(b), sum(sizes)
    for dtype in (torch.bfloat16, torch.float32):
        poison()
        y = grouped_mm(gpu_a, gpu_b, offsets.cuda(), out_dtype=dtype)
        assert (y.shape, y.dtype) == ((rows + SPARE, n), dtype)
        check(y, a, b, sizes, widen=wide_in_bf16 if in_bf16 else wide)
        assert torch.equal(grouped_mm(gpu_a, gpu_b, offsets.cuda(), out_dtype=dtype)[:rows], y[:rows])


@pytest.mark.parametrize("pair", ["strip-square", "mx"])
@pytest.mark.parametrize("tiling", [(64, 16, 2, 3, 4), (64, 64, 2, 3, 4), (128, 128, 1, 3, 8)], ids=str)
def test_every_tile_gives_the_numbers_of_one_gemm_for_each_group(tiling, pair):
    from octavo.ops.kernels import block_scaled_gemm as dense
    from octavo.ops.kernels import grouped_gemm as kernel

    how, sizes = dense.Tiling(*tiling), [40, 0, 1, 150, 129]
    a, b, offsets = examples.operands(sizes, 640, 272, spare=5, pair=pair)
    a, b = on_gpu(a), on_gpu(b)
    poison()
    y = kernel.grouped_mm(Operands.of(a, b), offsets.cuda(), torch.float32, False, how)
    for e, rows in enumerate(examples.rows_of(sizes)):
        alone = Operands(a.data[rows], b.data[e], a.scale[rows], b.scale[e], a.granularity, b.granularity)
        with tiled(dense, tiling):
            assert torch.equal(y[rows], dense.scaled_mm(alone, None, torch.float32))


def test_a_wrong_scale_of_one_matrix_is_seen_in_its_rows_alone():
    sizes = [16, 33, 7]
    a, b, offsets = examples.operands(sizes, 512, 272, pair="strip-square")
    product = examples.exact(a, b, sizes)
    largest = examples.row_error_bound(product, np.sqrt(examples.exact(a, b, sizes, power=2)), 512, fast=False)
    b.scale[1, 2] *= 2
    y = grouped_mm(on_gpu(a), on_gpu(b), offsets.cuda(), out_dtype=torch.float32).cpu().double().numpy()
    wrong = row_norm(y[:, 256:] - product[:, 256:]) > largest
    assert wrong[16:49].all()
    assert not wrong[:16].any()
    assert not wrong[49:].any()


def test_sizes_that_the_kernel_refuses_are_named():
    a, b, offsets = examples.operands([8, 8], 40, 32)
    with pytest.raises(ValueError, match=r"sizes in multiples of 16, got \[32, 40\]"):
        grouped_mm(on_gpu(a), on_gpu(b), offsets.cuda())


@pytest.mark.parametrize("pair", examples.GROUPED_PAIRS)
def test_no_step_waits_for_the_device(pair):
    a, b, offsets = examples.operands(SIZES[0], 48, 80, pair=pair)
    gpu_a, gpu_b, gpu_offsets = on_gpu(a), on_gpu(b), offsets.cuda()
    with no_waits():
        grouped_mm(gpu_a, gpu_b, gpu_offsets)
        aligned_groups(gpu_offsets, len(a.data))


# ---- Our kernels of row scales


TILES = [(64, 16, 4, 4), (64, 64, 4, 4), (64, 128, 3, 4), (128, 128, 3, 8), (128, 256, 4, 8), (256, 128, 4, 8)]
ALIGNED = [[128, 0, 256, 128, 384], [0, 0, 640], [1024, 128, 1024, 2048]]
FAST = pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])


@FAST
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_worst_row_and_gradients_of_each_tiling(tile, fast):
    from octavo.ops.kernels import grouped_gemm as kernel

    left, right, *rest = tile
    tiling, sizes = kernel.Tiling(left, right, 1, *rest), SIZES[-1]
    a, b, offsets = examples.operands(sizes, 528, 272, SPARE, "row-e5m2")
    poison()
    y = kernel.grouped_mm(Operands.of(on_gpu(a), on_gpu(b)), offsets.cuda(), torch.bfloat16, fast, tiling)
    check(y, a, b, sizes, fast)
    h, scale, x_t, offsets = examples.gradient_operands(ALIGNED[-1], ("e5m2", "e4m3"), 272, 528)
    check_gradients(gradient(h, scale, x_t, offsets, torch.bfloat16, fast, tiling), h, scale, x_t, ALIGNED[-1], fast)


def gradient(h, scale, x_t, offsets, dtype, fast, tiling=None):
    from octavo.ops.kernels import grouped_gemm as kernel

    poison()
    given = Operands(h.cuda(), x_t.cuda(), scale.cuda(), scale.cuda(), ROW, ROW)
    return kernel.grouped_mm_dw(given, offsets.cuda(), dtype, fast, tiling)


@FAST
@pytest.mark.parametrize("formats", [("e5m2", "e4m3"), ("e4m3", "e5m2"), ("e4m3", "e4m3")], ids=str)
@pytest.mark.parametrize("sizes", ALIGNED, ids=str)
def test_gradients_of_groups_and_of_empty_ones(sizes, formats, fast):
    h, scale, x_t, offsets = examples.gradient_operands(sizes, formats)
    for dtype in (torch.bfloat16, torch.float32):
        dw = gradient(h, scale, x_t, offsets, dtype, fast)
        assert (dw.shape, dw.dtype) == ((len(sizes), 96, 80), dtype)
        check_gradients(dw, h, scale, x_t, sizes, fast)


@FAST
@pytest.mark.parametrize("sizes", ALIGNED, ids=str)
def test_gradients_by_descriptors_have_the_bits_of_those_by_pointers(sizes, fast):
    from octavo.ops.kernels import grouped_gemm as kernel

    given = *examples.gradient_operands(sizes, ("e4m3", "e4m3"), 272, 528), torch.bfloat16, fast
    assert torch.equal(gradient(*given), gradient(*given, kernel.Tiling(128, 128, 1, 3, 8)))


@FAST
def test_sums_are_as_near_as_pytorchs(fast):
    """All products have one sign: there the tensor cores' sums lose the most."""
    sizes, n, k = [4096, 2048], 256, 512
    h, x_t = (torch.rand(size, sum(sizes)).to(torch.float8_e4m3fn) for size in (n, k))
    scale, offsets = torch.ones(2, n, 1), examples.offsets_of(sizes)
    wide = examples.exact_dw(h, scale, x_t, sizes)
    theirs = grouped_mm_dw(h.cuda(), scale.cuda(), x_t.cuda(), offsets.cuda(), fast_accumulation=fast)
    ours = gradient(h, scale, x_t, offsets, torch.bfloat16, fast)
    error, other = (
        np.linalg.norm(each.cpu().double().numpy() - wide) / np.linalg.norm(wide) for each in (ours, theirs)
    )
    assert error <= 1.25 * other + 2.0**-10
    assert fast or error < 2.0**-8


@pytest.mark.parametrize("formats", [("e5m2", "e4m3"), ("e4m3", "e5m2")], ids=str)
def test_the_operation_runs_e5m2_by_it(formats):
    h, scale, x_t, offsets = examples.gradient_operands([128, 0, 256], formats)
    assert find_grouped_backend(torch.device("cuda"), formats).name == "triton"
    dw = grouped_mm_dw(h.cuda(), scale.cuda(), x_t.cuda(), offsets.cuda(), out_dtype=torch.float32)
    assert torch.equal(dw, gradient(h, scale, x_t, offsets, torch.float32, fast=False))


def test_a_layer_with_e5m2_gradients_is_near_that_with_e4m3():
    """E5M2 has one bit of the mantissa less: twice the error of the gradients."""
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
