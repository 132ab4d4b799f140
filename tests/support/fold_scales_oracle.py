"""Scales for `fold_scales`, and its results by numpy's float64."""

import numpy as np
import torch
from torch import Tensor


def scales(t: int, n: int, spread: int = 20) -> tuple[Tensor, Tensor, Tensor]:
    """s_x [t, 1], powers of two s_g [t, 1], and s_w [n, 1], with exponents from -spread to spread."""
    torch.manual_seed(t + n)
    s_x, s_w = (((torch.rand(size, 1) + 1) * torch.randint(-spread, spread + 1, (size, 1)).exp2()) for size in (t, n))
    return s_x, torch.randint(-spread, spread + 1, (t, 1)).exp2(), s_w


def folded(s_x: Tensor, s_g: Tensor, s_w: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """dx, shift and dw, rounded to float32 once."""
    x, g = s_x.double().numpy(), s_g.double().numpy()
    exponent = np.floor(np.log2(x))
    c = g * 2.0**exponent
    dw = c.max() / (np.ones((1, 1)) if s_w is None else s_w.double().numpy())
    with np.errstate(over="ignore"):
        results = (g * 2.0**exponent / x).astype(np.float32), np.log2(c.max() / c), dw.astype(np.float32)
    dx, shift, dw = map(torch.from_numpy, results)
    return dx, shift.view(-1).int(), dw


def folded_by_group(s_x: Tensor, s_g: Tensor, s_w: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The same for groups of so many rows, each with its line of s_w [E, n, 1]; that of no rows has zeros in dw."""
    parts = zip(s_x.split(sizes), s_g.split(sizes), s_w, strict=True)
    found = [folded(*part) if len(part[0]) else (part[0], part[0].view(-1).int(), 0 * part[2]) for part in parts]
    dx, shift, dw = zip(*found, strict=True)
    return torch.cat(dx), torch.cat(shift), torch.stack(dw)
