"""Casting again by a known scale gives the bytes of the first cast, transposed."""

import pytest
import torch
from torch import Tensor

from octavo.numerics import ROW, TENSOR, Cast
from octavo.ops import quantize, quantize_scaled, quantize_stack, recast_transposed

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
formats = pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])


def matrix(device: str, rows: int = 70) -> Tensor:
    return (torch.randn(rows, 130) * torch.randn(rows, 1).exp()).bfloat16().to(device)


def same(found: Tensor, data: Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), data.t().contiguous().view(torch.uint8))


def by_row(scale: Tensor, x: Tensor) -> Tensor:
    return scale.expand(x.shape[0], 1).contiguous()


@devices
@formats
def test_rows_of_a_stack(device: str, fmt: str) -> None:
    parts, cast = [matrix(device), matrix(device, 33)], Cast(fmt, ROW)
    q = quantize_stack(parts, cast)
    assert same(recast_transposed(parts, q.scale, cast), q.data)


@devices
@formats
def test_a_tensor_by_its_scale_in_every_row(device: str, fmt: str) -> None:
    x, cast = matrix(device), Cast(fmt, TENSOR)
    q = quantize(x, cast)
    assert same(recast_transposed([x], by_row(q.scale, x), cast), q.data)


@devices
@formats
def test_what_outgrew_its_scale_saturates(device: str, fmt: str) -> None:
    x, cast = matrix(device), Cast(fmt, TENSOR)
    scale = quantize(x, cast).scale / 7
    q, _ = quantize_scaled(x, scale, cast)
    assert (q.data.float().abs() == cast.fmt.max).any()
    assert same(recast_transposed([x], by_row(scale, x), cast), q.data)


@devices
@formats
def test_a_scale_that_is_nan_gives_nan(device: str, fmt: str) -> None:
    x = matrix(device)
    x[3, 4] = torch.inf
    scale = torch.full((x.shape[0], 1), torch.nan, device=device)
    assert recast_transposed([x], scale, Cast(fmt, TENSOR)).float().isnan().all()
