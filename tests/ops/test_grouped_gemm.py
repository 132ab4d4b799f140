"""The grouped GEMM on a CPU against float64 on the same quantized operands, and its errors."""

import grouped_examples as examples
import numpy as np
import pytest
import torch
from gemm_examples import worst_row

from octavo import ops
from octavo.numerics import Cast, QTensor, block
from octavo.recipe import BLOCK_W, BLOCK_X, MX_GROUPS, ROW_W


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pair", examples.GROUPED_PAIRS)
@pytest.mark.parametrize("sizes", examples.SIZES.values(), ids=examples.SIZES)
def test_each_row_times_the_matrix_of_its_group(sizes, pair, dtype):
    a, b, offsets = examples.operands(sizes, 48, 32, pair=pair)
    y = ops.grouped_mm(a, b, offsets, out_dtype=dtype)
    assert (y.shape, y.dtype) == ((sum(sizes), 32), dtype)
    assert worst_row(y, examples.exact(a, b, sizes)) < {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}[dtype]


def test_matrices_may_be_transposed_views():
    a, b, offsets = examples.operands(examples.SIZES["ragged"], 48, 32)
    turned = b.data.view(torch.uint8).permute(2, 0, 1).contiguous().permute(1, 2, 0).view(b.data.dtype)  # [K, E, N]
    assert not turned.is_contiguous()
    y = ops.grouped_mm(a, QTensor(turned, b.scale, b.format, b.granularity), offsets)
    assert torch.equal(y, ops.grouped_mm(a, b, offsets))


def test_no_rows_at_all():
    a, b, offsets = examples.operands([0, 0], 48, 32)
    assert ops.grouped_mm(a, b, offsets).shape == (0, 32)


@pytest.mark.parametrize("sizes", examples.SIZES.values(), ids=examples.SIZES)
def test_the_gradient_of_each_matrix_reduces_over_its_group(sizes):
    h, x_t = (torch.randn(32, sum(sizes)).to(torch.float8_e4m3fn) for _ in range(2))  # both fit in each other's place
    scale = torch.rand(len(sizes), 32, 1) + 0.1
    dw = ops.grouped_mm_dw(h, scale, x_t, examples.offsets_of(sizes), out_dtype=torch.float32)
    wide = examples.exact_dw(h, scale, x_t, sizes)
    assert np.abs(dw.double().numpy() - wide).max() <= 1e-5 * np.abs(wide).max()
    assert [e for e in range(len(sizes)) if not dw[e].any()] == [e for e, size in enumerate(sizes) if size == 0]


@pytest.mark.parametrize("cast", [ROW_W, Cast(), Cast(scale="pow2", relative_floor=0.25)], ids=str)
def test_the_floor_of_a_matrix_does_not_depend_on_the_others(cast):
    w = torch.randn(4, 10, 32) * torch.exp2(torch.randint(-20, 1, (4, 10, 1)))
    q, alone = ops.quantize_matrices(w, cast), [ops.quantize_stack([matrix], cast) for matrix in w]
    assert torch.equal(q.scale, torch.stack([part.scale for part in alone]))
    assert torch.equal(q.data.view(torch.uint8), torch.stack([part.data.view(torch.uint8) for part in alone]))


# ---- scales along the reduction


@pytest.mark.parametrize("pair", ["strip-strip", "group64", "group64-e5m2", "mx"])
@pytest.mark.parametrize("sizes", [[128, 0, 256], [0, 384, 128]], ids=str)
def test_the_gradient_of_operands_with_scales_along_the_rows_of_groups(sizes, pair):
    a, b, offsets = examples.quantized_columns(sizes, pair)
    options = {"scale_b": b.scale, "granularity": b.granularity, "out_dtype": torch.float32}
    dw = ops.grouped_mm_dw(a.data, a.scale, b.data, offsets, **options)
    found, expected = (each.reshape(-1, 80) for each in (dw, examples.exact_columns(a, b, sizes)))
    assert worst_row(found, expected) < 1e-6


@pytest.mark.parametrize("cast", [BLOCK_X, MX_GROUPS], ids=str)
def test_no_scale_is_shared_by_rows_of_two_groups(cast):
    sizes = [0, 1, 127, 128, 129]
    x = torch.randn(sum(sizes) + 5, 48)
    _, ends, place, _ = ops.aligned_groups(examples.offsets_of(sizes), len(x))
    q, start = ops.quantize_transposed(x, cast, place), 0
    for size, end in zip(sizes, ends.tolist(), strict=True):
        alone, first = ops.quantize(x[start : start + size].t().contiguous(), cast), end - max(-(-size // 128), 1) * 128
        blocks = alone.scale.shape[1]
        assert torch.equal(q.data[:, first : first + size].float(), alone.data.float())
        assert torch.equal(q.scale[:, first // cast.granularity.cols :][:, :blocks].float(), alone.scale.float())
        assert not q.data[:, first + size : end].float().any()
        start += size


@pytest.mark.parametrize("n", [128, 80])
@pytest.mark.parametrize("cast", [BLOCK_W, MX_GROUPS, Cast(granularity=block(32, 32))], ids=str)
def test_no_block_lies_in_two_matrices(cast, n):
    w = torch.randn(3, n, 96)
    for q, alone in (
        (ops.quantize_matrices(w, cast), [ops.quantize(matrix, cast) for matrix in w]),
        (ops.quantize_matrices_transposed(w, cast), [ops.quantize(matrix.t().contiguous(), cast) for matrix in w]),
    ):
        assert torch.equal(q.data.float(), torch.stack([part.data.float() for part in alone]))
        assert torch.equal(q.scale.float(), torch.stack([part.scale.float() for part in alone]))
