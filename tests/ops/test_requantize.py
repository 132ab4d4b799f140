"""Requantization by the same scale gives the bytes of the first quantization, transposed."""

import pytest
import torch
from bits import assert_same_numbers
from quantize_oracle import matrix

from octavo.numerics import ROW, TENSOR, Cast, Granularity, block
from octavo.ops import quantize, quantize_scaled, quantize_stack, requantize, requantize_transposed, row_scales

formats = pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])


def same(actual: torch.Tensor, data: torch.Tensor) -> bool:
    return torch.equal(actual.view(torch.uint8), data.t().contiguous().view(torch.uint8))


@formats
def test_rows_of_a_stack(fmt: str) -> None:
    parts, cast = [matrix((70, 130), torch.bfloat16), matrix((33, 130), torch.bfloat16)], Cast(fmt, ROW)
    q = quantize_stack(parts, cast)
    assert same(requantize_transposed(parts, q.scale, cast), q.data)


@formats
@pytest.mark.parametrize("floor", [0.0, 2.0**-4])
def test_rows_of_parts_by_their_common_scales(fmt: str, floor: float) -> None:
    """The largest scale of two halves of a row is that of the row, and gives the bytes of the whole."""
    x, cast = matrix((70, 130), torch.bfloat16), Cast(fmt, ROW, relative_floor=floor)
    x[5, 3] = torch.nan
    halves, q = x.split(65, dim=1), quantize(x, cast)
    scale = torch.stack([row_scales([half.contiguous()], cast) for half in halves]).amax(0)
    scale = torch.maximum(scale, scale.nan_to_num(0).amax() * floor)
    assert torch.equal(scale.nan_to_num(7), q.scale.nan_to_num(7))
    for half, data in zip(halves, q.data.split(65, dim=1), strict=True):
        assert_same_numbers(requantize([half], scale, cast).data, data)


@formats
@pytest.mark.parametrize("rows", [130, 300])
@pytest.mark.parametrize("granularity", [TENSOR, block(128, 128), block(16, 16)], ids=lambda shared: shared.name)
def test_a_tensor_and_square_blocks(fmt: str, granularity: Granularity, rows: int) -> None:
    x, cast = matrix((rows, 130), torch.bfloat16), Cast(fmt, granularity)
    q = quantize(x, cast)
    assert same(requantize_transposed([x], q.scale, cast), q.data)


@formats
def test_what_outgrew_its_scale_saturates_and_a_scale_that_is_nan_gives_nan(fmt: str) -> None:
    x, cast = matrix((70, 130), torch.bfloat16), Cast(fmt, TENSOR)
    scale = quantize(x, cast).scale / 7
    q, _ = quantize_scaled(x, scale, cast)
    assert (q.data.float().abs() == cast.fmt.max).any()
    assert same(requantize_transposed([x], scale, cast), q.data)
    x[3, 4] = torch.inf
    assert requantize_transposed([x], torch.full((1, 1), torch.nan), cast).float().isnan().all()
