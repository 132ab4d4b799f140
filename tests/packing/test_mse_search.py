"""The search of scales, against a search in float64 with ml_dtypes' casts, block by block."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.artifact.packed.scheme import SCHEMES
from octavo.numerics import TENSOR, Cast, group
from octavo.ops import quantize
from octavo.packing.mse_search import (
    FACTORS,
    INTEGER_FACTORS,
    POWER_OF_TWO_FACTORS,
    SearchedScale,
    cast_by,
    search_scale,
    search_shared_scale,
)

CASTS = {scheme.name: scheme.weight for scheme in SCHEMES.values() if scheme.name != "static"}
CASTS |= {"channel pow2": Cast(scale="pow2"), "group64 pow2": Cast(granularity=group(64), scale="pow2")}


def blocks(w: Tensor, scale: Tensor, cast: Cast) -> list[tuple[tuple[int, ...], Tensor]]:
    """Each block of `w` with the place of its scale."""
    r, c = cast.granularity.block(tuple(w.shape))
    rows, cols = scale.shape
    return [((i, j), w[i * r : (i + 1) * r, j * c : (j + 1) * c]) for i in range(rows) for j in range(cols)]


def rounding_error(w: Tensor, scale: float, cast: Cast) -> float:
    exact = w.double().numpy() / scale
    if cast.format == "int8":
        return float(((np.clip(np.rint(exact), -127, 127) - exact) ** 2).sum()) * scale**2
    q = np.clip(exact, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return float(((q - exact) ** 2).sum()) * scale**2


def search(w: Tensor, cast: Cast) -> SearchedScale:
    return search_scale(w, quantize(w, cast).scale.float(), cast)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASTS)
def test_no_scale_of_the_grid_is_better(name: str, dtype: torch.dtype) -> None:
    cast = CASTS[name]
    w = (torch.randn(256, 384) * torch.logspace(-2, 1, 256)[:, None]).to(dtype)
    first = quantize(w, cast).scale.float()
    found = search_scale(w, first, cast)
    factors = INTEGER_FACTORS if cast.format == "int8" else FACTORS
    factors = POWER_OF_TWO_FACTORS if cast.power_of_two else factors
    before = after = 0.0
    for place, block in blocks(w, first, cast):
        errors = [rounding_error(block, float(first[place]) * factor, cast) for factor in factors]
        chosen = rounding_error(block, float(found.scale[place]), cast)
        assert chosen <= min(errors) * (1 + 1e-5)
        before, after = before + errors[0], after + chosen
    assert float(found.before) == pytest.approx(before, rel=1e-5)
    assert float(found.after) == pytest.approx(after, rel=1e-5)
    error = (cast_by(w, found.scale, cast).dequantize().double() - w.double()).square().sum()
    assert float(error) == pytest.approx(after, rel=1e-5)


def test_a_grid_in_which_the_best_is_known() -> None:
    """Numbers of e4m3 up to its largest are exact with factor 1, those up to 256 with 448/256."""
    numbers = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().view(1, -1)
    found = search(numbers, Cast())
    assert float(found.scale) == 1
    assert float(found.after) == 0
    smaller = numbers[numbers <= 256].view(1, -1)
    found = search(smaller, Cast())
    assert float(found.scale) == pytest.approx(1, rel=1e-6)
    assert float(found.after) < 1e-9 * float(found.before)


def test_an_outlier_that_costs_more_than_it_is_worth_is_clipped() -> None:
    """All but one element are half a step off unless they are moved onto e4m3's largest number."""
    w = torch.full((1, 4096), 448 * 0.8)
    w[0, 0] = 448
    w[0, 1::2] = 256 * 0.8  # and these need just that factor, too
    found = search(w, Cast())
    assert float(found.scale) == pytest.approx(0.8)
    assert cast_by(w, found.scale, Cast()).data[0, 0].float() == 448
    assert float(found.after) == pytest.approx((448 - 448 * 0.8) ** 2, rel=1e-4)


def test_one_scale_for_several_is_the_best_for_all_of_them() -> None:
    weights = [torch.randn(64, 96), torch.randn(32, 96) * 0.7]
    cast = Cast(granularity=TENSOR)
    scale = quantize(weights[0], cast).scale
    found = search_shared_scale(iter(weights), scale, cast)
    together = search_scale(torch.cat(weights), scale, cast)
    assert torch.equal(found.scale, together.scale)
    assert found.before.shape == found.after.shape == (2,)
    assert float(found.after.sum()) == pytest.approx(float(together.after), rel=1e-6)


@pytest.mark.parametrize("name", CASTS)
def test_the_cast_by_the_first_scale_is_the_quantizer(name: str) -> None:
    cast = CASTS[name]
    w = torch.randn(256, 384) * torch.logspace(-3, 1, 256)[:, None]
    w[3], w[4, :5] = 0, 1e-30
    q = quantize(w, cast)
    again = cast_by(w, q.scale.float(), cast)
    assert torch.equal(again.data.view(torch.uint8), q.data.view(torch.uint8))


@pytest.mark.parametrize("fill", [0.0, 1e-38, 1e-44, 3e38])
def test_the_ends_of_float32(fill: float) -> None:
    for cast in (Cast(), Cast(granularity=TENSOR), Cast(granularity=group(32)), Cast(scale="pow2")):
        w = torch.full((2, 64), fill)
        found = search(w, cast)
        assert (found.scale >= 2.0**-126).all()
        assert found.scale.isfinite().all()
        assert found.before.isfinite().all()
        assert (found.after <= found.before).all()
        assert not cast_by(w, found.scale, cast).data.float().isnan().any()


def test_powers_of_two_stay_such() -> None:
    w = torch.randn(64, 128) * torch.logspace(-3, 1, 64)[:, None]
    for cast in (Cast(scale="pow2"), Cast(granularity=group(32), scale="e8m0")):
        scale = search(w, cast).scale
        assert torch.equal(torch.exp2(scale.log2().round()), scale)


def test_the_gain_is_what_the_text_says() -> None:
    """Of normal weights, in dB: small, and larger the fewer elements share a scale."""
    w = torch.randn(512, 1024)
    gains = {}
    for name in ("tensor", "block", "channel", "group128", "group32"):
        found = search(w, CASTS[name])
        gains[name] = 10 * math.log10(float(found.before / found.after))
    assert list(gains.values()) == sorted(gains.values())
    assert gains["tensor"] < 0.1 < gains["channel"] < 0.6
    assert 0.8 < gains["group128"] < 1.3
    assert 1.6 < gains["group32"] < 2.2
