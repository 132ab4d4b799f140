"""Rows of many matrices: quantized together with the bytes and scales of each by itself, or added up."""

import pytest
import torch
from bits import assert_same_numbers
from row_batch_examples import PADDING, SIZES, matrices, quantized, starts

from octavo.numerics import ROW, TENSOR, Cast
from octavo.ops import quantize, quantize_scaled
from octavo.ops.launching import RowBatch
from octavo.ops.rows import add_rows, cast_rows

CASTS = [Cast(relative_floor=2.0**-8), Cast(), Cast("e5m2", ROW, "pow2", relative_floor=0.25)]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.spec)
def test_each_matrix_as_by_itself(cast: Cast, at_once: bool) -> None:
    parts = matrices(40, torch.bfloat16)
    _, data, scale = quantized(parts, cast, at_once=at_once)
    for x, start in zip(parts, starts(), strict=True):
        expected = quantize(x, cast)
        assert_same_numbers(data[start : start + x.shape[0]], expected.data)
        assert_same_numbers(scale[start : start + x.shape[0], None], expected.scale)


def test_memory_between_the_matrices_stays() -> None:
    _, data, _ = quantized(matrices(40, torch.float32), Cast(), at_once=False)
    for start, rows in zip(starts(), SIZES, strict=True):
        assert (data[start + rows : start + rows + PADDING].view(torch.uint8) == 7).all()


def test_numbers_beyond_a_given_scale_saturate() -> None:
    x, scale = torch.randn(5, 24) * 100, torch.full((1, 1), 0.01)
    data = torch.zeros(5, 24).to(torch.float8_e4m3fn)
    cast_rows(RowBatch([x], [0]), scale.view(1).repeat(5), None, data, Cast())
    assert_same_numbers(data, quantize_scaled(x, scale, Cast(granularity=TENSOR))[0].data)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("shape", [(2, 1000), (3, 7), (1, 5), (4, 0)])
def test_the_sums_are_those_of_float64(shape: tuple[int, int], mean: bool) -> None:
    rows, total = torch.randn(shape).bfloat16(), torch.full(shape[1:], torch.nan)
    add_rows(rows, total, mean=mean)
    expected = rows.double().mean(0) if mean else rows.double().sum(0)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=1e-6)
