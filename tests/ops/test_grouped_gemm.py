"""The grouped GEMM on a CPU against float64 on the same quantized operands, and its errors."""

import numpy as np
import pytest
import torch
from gemm_examples import worst_row
from grouped_examples import GROUPED_PAIRS, SIZES, exact, exact_dw, offsets_of, operands

from octavo.numerics import Cast, QTensor
from octavo.ops import grouped_mm, grouped_mm_dw, quantize_matrices, quantize_stack
from octavo.recipe import ROW_W


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pair", GROUPED_PAIRS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_row_times_the_matrix_of_its_group(sizes, pair, dtype):
    a, b, offsets = operands(sizes, 48, 32, pair=pair)
    y = grouped_mm(a, b, offsets, out_dtype=dtype)
    assert (y.shape, y.dtype) == ((sum(sizes), 32), dtype)
    assert worst_row(y, exact(a, b, sizes)) < {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}[dtype]


def test_matrices_may_be_transposed_views():
    a, b, offsets = operands(SIZES["ragged"], 48, 32)
    turned = b.data.view(torch.uint8).permute(2, 0, 1).contiguous().permute(1, 2, 0).view(b.data.dtype)  # [K, E, N]
    assert not turned.is_contiguous()
    y = grouped_mm(a, QTensor(turned, b.scale, b.format, b.granularity), offsets)
    assert torch.equal(y, grouped_mm(a, b, offsets))


def test_no_rows_at_all():
    a, b, offsets = operands([0, 0], 48, 32)
    assert grouped_mm(a, b, offsets).shape == (0, 32)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_gradient_of_each_matrix_reduces_over_its_group(sizes):
    torch.manual_seed(0)
    h, x_t = (torch.randn(n, sum(sizes)).to(torch.float8_e4m3fn) for n in (32, 48))
    scale = torch.rand(len(sizes), 32, 1) + 0.1
    dw = grouped_mm_dw(h, scale, x_t, offsets_of(sizes), out_dtype=torch.float32)
    wide = exact_dw(h, scale, x_t, sizes)
    assert np.abs(dw.double().numpy() - wide).max() <= 1e-5 * np.abs(wide).max()
    assert [e for e in range(len(sizes)) if not dw[e].any()] == [e for e, size in enumerate(sizes) if size == 0]


@pytest.mark.parametrize("cast", [ROW_W, Cast(), Cast(scale="pow2", relative_floor=0.25)], ids=str)
def test_the_floor_of_a_matrix_does_not_depend_on_the_others(cast):
    torch.manual_seed(0)
    w = torch.randn(4, 10, 32) * torch.exp2(torch.randint(-20, 1, (4, 10, 1)))
    q, alone = quantize_matrices(w, cast), [quantize_stack([matrix], cast) for matrix in w]
    assert torch.equal(q.scale, torch.stack([part.scale for part in alone]))
    assert torch.equal(q.data.view(torch.uint8), torch.stack([part.data.view(torch.uint8) for part in alone]))
