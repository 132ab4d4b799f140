"""Measures of the error of a tensor."""

import torch
from torch import Tensor


def sqnr(exact: Tensor, found: Tensor) -> float:
    """The signal to quantization noise ratio over all elements, in dB."""
    exact, found = (t.detach().cpu().double() for t in (exact, found))
    assert exact.shape == found.shape
    noise = (exact - found).square().sum().clamp(min=1e-300)
    return float(10 * torch.log10(exact.square().sum() / noise))


def distance(found: Tensor, exact: Tensor) -> float:
    """The norm of the error over the norm of `exact`."""
    found, exact = (t.detach().cpu().double() for t in (found, exact))
    assert exact.shape == found.shape
    return float((found - exact).norm() / exact.norm())
