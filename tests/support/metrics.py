"""Measures of the error of a tensor."""

import numpy as np
import torch
from torch import Tensor


def sqnr(exact: Tensor | np.ndarray, actual: Tensor | np.ndarray) -> float:
    """The signal to quantization noise ratio over all elements, in dB."""
    exact, actual = (torch.as_tensor(t).detach().cpu().double() for t in (exact, actual))
    assert exact.shape == actual.shape
    noise = (exact - actual).square().sum().clamp(min=1e-300)
    return float(10 * torch.log10(exact.square().sum() / noise))


def distance(actual: Tensor, exact: Tensor) -> float:
    """The norm of the error over the norm of `exact`."""
    actual, exact = (t.detach().cpu().double() for t in (actual, exact))
    assert exact.shape == actual.shape
    return float((actual - exact).norm() / exact.norm())
