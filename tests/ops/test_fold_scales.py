"""The scales of the backward GEMMs against float64, and the inputs that are refused."""

import pytest
import torch
from fold_scales_oracle import folded, scales

from octavo.ops import fold_scales


@pytest.mark.parametrize(("t", "n", "spread"), [(1, 1, 3), (257, 5, 20), (300, 96, 60)])
@pytest.mark.parametrize("with_w", [True, False])
def test_they_are_rounded_once(t, n, spread, with_w):
    s_x, s_g, s_w = scales(t, n, spread)
    given = s_x, s_g, s_w if with_w else None
    for actual, expected in zip(fold_scales(*given), folded(*given), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


def test_the_scales_for_dw_undo_the_shift():
    s_x, s_g, s_w = scales(40, 8)
    dx, shift, dw = fold_scales(s_x, s_g, s_w)
    product = dx.double() * s_x.double()  # s_g * 2^e, but for the rounding of dx
    torch.testing.assert_close(torch.exp2(-shift.double()) * (dw.double() * s_w)[0], product[:, 0], rtol=2e-7, atol=0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"s_g": torch.ones(3, 1)}, r"s_g must be torch.float32 \[4, 1\], got torch.float32 \[3, 1\]"),
        ({"s_x": torch.ones(4)}, r"s_x must be torch.float32 \[4, 1\], got torch.float32 \[4\]"),
        ({"s_w": torch.ones(6, 1).double()}, r"s_w must be torch.float32 \[6, 1\], got torch.float64 \[6, 1\]"),
    ],
)
def test_other_scales_are_refused(changed, message):
    given = {"s_x": torch.ones(4, 1), "s_g": torch.ones(4, 1), "s_w": torch.ones(6, 1)} | changed
    with pytest.raises(ValueError, match=message):
        fold_scales(**given)
