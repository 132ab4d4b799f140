"""A Hadamard rotation spreads an outlier over its row."""

from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import octavo
from bench.figures.scales import int8, sqnr
from bench.figures.style import BLUE, GREY, canvas
from octavo.numerics.scaling import hadamard

WIDTH, OUTLIER, CHANNEL = 64, 40.0, 21


def tokens() -> Tensor:
    """Normal tokens [256, WIDTH] with one channel OUTLIER times larger."""
    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(0))
    x[:, CHANNEL] *= OUTLIER
    return x


def product_sqnr(x: Tensor, w: Tensor, *, rotate: bool, eight_bit_integers: bool) -> float:
    """dB of x w^T with x quantized, one scale for the tensor; with both rotated before."""
    a, b = (hadamard(x), hadamard(w)) if rotate else (x, w)
    q = int8(a) if eight_bit_integers else octavo.quantize(a, granularity="tensor").dequantize()
    return sqnr(x @ w.t(), q @ b.t())


def rotation() -> Figure:
    """One token before and after, and what the product gains."""
    figure, grid = canvas(2.7, columns=3)
    x = tokens()
    for axes, values, title in zip(grid, (x, hadamard(x)), ("a token", "the same token, rotated"), strict=False):
        axes.bar(range(WIDTH), values[0].abs().tolist(), width=1, color=BLUE)
        axes.set_title(title)
        axes.set_ylim(0, 1.05 * float(x[0].abs().max()))
        axes.set_xlabel("channel")
        axes.set_ylabel("magnitude")
    gains(grid[2], x)
    return figure


def gains(axes: Any, x: Tensor) -> None:
    w = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))
    for shift, rotate, color, label in ((-0.2, False, GREY, "as it is"), (0.2, True, BLUE, "rotated")):
        found = [product_sqnr(x, w, rotate=rotate, eight_bit_integers=integers) for integers in (True, False)]
        places = [place + shift for place in range(2)]
        axes.bar(places, found, width=0.36, color=color, label=label)
        for place, decibels in zip(places, found, strict=True):
            axes.text(place, decibels, f"{decibels:.1f}", ha="center", va="bottom")
    axes.set_xticks([0, 1], ["INT8", "E4M3"])
    axes.set_ylim(0, 60)
    axes.set_title("SQNR of the product, dB")
    axes.legend(loc="upper center", ncols=2)
