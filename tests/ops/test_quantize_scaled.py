"""Quantization by a given scale, against numpy and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest
import torch
from quantize_oracle import KINDS, matrix

from octavo.numerics import TENSOR, Cast, History
from octavo.ops import quantize_scaled


@pytest.mark.parametrize("fmt", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_scaled_saturates_and_reports_amax(fmt, dtype):
    cast = Cast(fmt, TENSOR, history=History())
    x = matrix((17, 130), dtype)
    top = np.float32(ml_dtypes.finfo(KINDS[fmt]).max)
    scale = x.abs().amax().float().view(1, 1) / float(top) / 3  # a third of what would fit
    q, amax = quantize_scaled(x, scale, cast)
    shrunk = x.float().numpy() * (np.float32(1) / scale.numpy())
    assert (np.abs(shrunk) > 2 * top).any()
    assert np.array_equal(
        q.data.view(torch.uint8).numpy(), np.clip(shrunk, -top, top).astype(KINDS[fmt]).view(np.uint8)
    )
    assert (amax.shape, amax.dtype, amax.item()) == ((1, 1), torch.float32, np.abs(x.float().numpy()).max())
    assert (q.granularity, q.format, q.scale.item()) == (TENSOR, cast.fmt, scale.item())


def test_quantize_scaled_of_no_rows():
    """An expert may get no tokens; its delayed scale is still [1, 1]."""
    q, amax = quantize_scaled(torch.zeros(0, 16), torch.ones(1, 1), Cast(granularity=TENSOR))
    assert (tuple(q.data.shape), amax.item()) == ((0, 16), 0.0)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("fmt", KINDS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_quantize_scaled_is_nan_throughout_where_x_is_not_finite(poison, fmt, rounding):
    x = torch.ones(5, 7)
    x[3, 4] = poison
    q, amax = quantize_scaled(x, torch.ones(1, 1), Cast(fmt, TENSOR, rounding=rounding))
    assert not amax.isfinite()
    assert q.data.float().isnan().all()
