"""The grouped GEMMs of a Hopper against float64 on the same quantized operands, judged by row (`test_gemm_gpu`)."""

import numpy as np
import pytest
import torch
from gemm_examples import on_gpu, row_norm, wide, wide_in_bf16
from gpu_memory import no_waits, poison
from grouped_examples import GROUPED_PAIRS, exact, exact_dw, offsets_of, operands, rows_of
from grouped_examples import row_error_bound as bound
from hopper import ONLY_HOPPER

from octavo.ops import aligned_groups, grouped_mm, grouped_mm_dw, transpose
from octavo.ops import dispatch as backend
from octavo.ops.dispatch import MAX_MEAN_ROWS
from octavo.ops.launching import Operands

pytestmark = [pytest.mark.gpu, ONLY_HOPPER]

SIZES = [[7, 0, 33, 16, 1], [0, 0, 640], [257, 0, 0, 129], [1, 1, 1], [1000, 24, 1024, 2048]]


@pytest.fixture(params=["promoted by CUTLASS", "promoted", "fast"])
def fast(request, monkeypatch) -> bool:
    """Whether sums are fast. PyTorch's kernel or ours computes promoted ones, for all numbers of rows."""
    for limit in ("CUTLASS_ROWS", "CUTLASS_ROWS_OF_WIDE"):
        monkeypatch.setattr(backend, limit, -1 if "CUTLASS" in request.param else 1 << 30)
    return request.param == "fast"


@pytest.mark.parametrize(("k", "n"), [(16, 16), (48, 80), (512, 1024)])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_worst_row(sizes, k, n, fast):
    a, b, offsets = operands(sizes, k, n, spare=3)
    product = exact(a, b, sizes)
    size = np.sqrt(exact(a, b, sizes, power=2))
    gpu_a, gpu_b, rows = on_gpu(a), on_gpu(b), sum(sizes)
    first = None
    for _ in range(3):
        poison()
        y = grouped_mm(gpu_a, gpu_b, offsets.cuda(), fast_accumulation=fast)[:rows].cpu()
        error = row_norm(y.double().numpy() - product[:rows])
        assert (error <= bound(product[:rows], size[:rows], k, fast)).all()
        assert first is None or torch.equal(first, y)
        first = y


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_of_ragged_groups(sizes, fast):
    torch.manual_seed(0)
    n, k, rows = 96, 64, sum(sizes)
    g, x = (torch.randn(rows, columns).to(torch.float8_e4m3fn) for columns in (n, k))
    scale = torch.rand(len(sizes), n, 1) + 0.1
    ends, place = aligned_groups(offsets_of(sizes).cuda(), rows)
    h, x_t = transpose(g.cuda(), place=place), transpose(x.cuda(), place=place)
    g_t, columns = g.double().t(), x.double().t()
    product = exact_dw(g_t, scale, columns, sizes)
    wide = exact_dw(g_t.square(), scale.square(), columns.square(), sizes)
    poison()
    dw = grouped_mm_dw(h, scale.cuda(), x_t, ends, fast_accumulation=fast).cpu().double().numpy()
    for e, size in enumerate(sizes):
        error = row_norm(dw[e] - product[e])
        assert (error <= bound(product[e], np.sqrt(wide[e]), size, fast)).all()
        assert size or not dw[e].any()


MANY_ROWS = [MAX_MEAN_ROWS + 300, MAX_MEAN_ROWS - 200]


@pytest.mark.parametrize("pair", GROUPED_PAIRS[1:])
@pytest.mark.parametrize(("k", "n"), [(48, 80), (512, 272)])
@pytest.mark.parametrize("sizes", [*SIZES, MANY_ROWS], ids=str)
def test_worst_row_of_scales_along_k(sizes, k, n, pair):
    """Groups smaller than 128 run as a BF16 product where there are many rows: it multiplies operands in BF16."""
    a, b, offsets = operands(sizes, k, n, spare=3, pair=pair)
    in_bf16 = not pair.startswith("strip") and a.shape[0] > MAX_MEAN_ROWS * len(sizes)
    product, squares = (exact(a, b, sizes, power, wide_in_bf16 if in_bf16 else wide) for power in (1, 2))
    largest = bound(product, np.sqrt(squares), k, fast=False)
    gpu_a, gpu_b, rows = on_gpu(a), on_gpu(b), sum(sizes)
    for dtype in (torch.bfloat16, torch.float32):
        poison()
        y = grouped_mm(gpu_a, gpu_b, offsets.cuda(), out_dtype=dtype)
        assert (y.shape, y.dtype) == ((rows + 3, n), dtype)
        error = row_norm(y[:rows].cpu().double().numpy() - product[:rows])
        assert (error <= largest[:rows]).all(), (error / largest[:rows]).max()
        assert torch.equal(grouped_mm(gpu_a, gpu_b, offsets.cuda(), out_dtype=dtype)[:rows], y[:rows])


@pytest.mark.parametrize("pair", ["strip-square", "mx"])
@pytest.mark.parametrize("tiling", [(64, 16, 2, 3, 4), (64, 64, 2, 3, 4), (128, 128, 1, 3, 8)], ids=str)
def test_every_tile_gives_the_numbers_of_one_gemm_for_each_group(tiling, pair):
    from octavo.ops.kernels import block_scaled_gemm as dense
    from octavo.ops.kernels import grouped_gemm as kernel

    how, sizes = dense.Tiling(*tiling), [40, 0, 1, 150, 129]
    a, b, offsets = operands(sizes, 640, 272, spare=5, pair=pair)
    a, b = on_gpu(a), on_gpu(b)
    poison()
    y = kernel.block_scaled_grouped_mm(Operands.of(a, b), offsets.cuda(), torch.float32, how)
    for e, rows in enumerate(rows_of(sizes)):
        alone = Operands(a.data[rows], b.data[e], a.scale[rows], b.scale[e], a.granularity, b.granularity)
        assert torch.equal(y[rows], dense.scaled_mm(alone, None, torch.float32, None, how))


def test_a_wrong_scale_of_one_matrix_is_seen_in_its_rows_alone():
    sizes = [16, 33, 7]
    a, b, offsets = operands(sizes, 512, 272, pair="strip-square")
    product = exact(a, b, sizes)
    largest = bound(product, np.sqrt(exact(a, b, sizes, power=2)), 512, fast=False)
    b.scale[1, 2] *= 2
    y = grouped_mm(on_gpu(a), on_gpu(b), offsets.cuda(), out_dtype=torch.float32).cpu().double().numpy()
    wrong = row_norm(y[:, 256:] - product[:, 256:]) > largest
    assert wrong[16:49].all()
    assert not wrong[:16].any()
    assert not wrong[49:].any()


def test_sizes_that_the_kernel_refuses_are_named():
    a, b, offsets = operands([8, 8], 40, 32)
    with pytest.raises(ValueError, match=r"sizes in multiples of 16, got \[32, 40\]"):
        grouped_mm(on_gpu(a), on_gpu(b), offsets.cuda())


@pytest.mark.parametrize("pair", GROUPED_PAIRS)
def test_no_step_waits_for_the_device(pair):
    a, b, offsets = operands(SIZES[0], 48, 80, pair=pair)
    gpu_a, gpu_b, gpu_offsets = on_gpu(a), on_gpu(b), offsets.cuda()
    with no_waits():
        grouped_mm(gpu_a, gpu_b, gpu_offsets)
        aligned_groups(gpu_offsets, len(a.data))
