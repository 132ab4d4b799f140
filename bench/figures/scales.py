"""A scale moves a tensor into the range of a format; the granularity says how many elements share it."""

from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

import octavo
from bench.figures.style import BLUE, GREEN, GREY, INK, LIGHT, ORANGE, PALE_BLUE, PINK, bare, canvas
from octavo.numerics.formats import E4M3

GRANULARITIES = {"tensor": ORANGE, "row": BLUE, "group:128": GREEN, "block:128x128": PINK}


def gradients() -> Tensor:
    """Numbers as small as gradients often are, spread over many binades: float32 [65536]."""
    generator = torch.Generator().manual_seed(0)
    return 5e-4 * torch.randn(65536, generator=generator) * torch.randn(65536, generator=generator).exp()


def lost(x: Tensor) -> float:
    """The share of the numbers of `x` that become 0 in E4M3 as they are."""
    return float((x.to(E4M3.dtype).float() == 0).float().mean())


def scaling() -> Figure:
    """The binades of a tensor before and after scaling, over those of E4M3."""
    figure, panels = canvas(3.2, rows=2, sharex=True)
    x = gradients()
    scale = float(x.abs().max()) / E4M3.max
    bins = [2.0**e for e in range(-34, 11)]
    for axes, values, title in zip(panels, (x, x / scale), ("x", "x / scale, where scale = amax / 448"), strict=True):
        axes.hist(values.abs().tolist(), bins, color=BLUE)
        axes.axvspan(E4M3.smallest_normal, E4M3.max, color=PALE_BLUE, zorder=0, linewidth=0)
        axes.axvspan(E4M3.smallest_subnormal / 2, E4M3.smallest_normal, color=LIGHT, zorder=0, linewidth=0)
        axes.set_title(f"{title}: {100 * lost(values):.1f} % of the numbers become 0 in E4M3")
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
    panels[0].set_xscale("log", base=2)
    panels[0].set_xlim(bins[0], bins[-1])
    top = panels[0].get_ylim()[1]
    panels[0].text(2.0**1.5, 0.8 * top, "normal numbers\nof E4M3", ha="center", va="center", color=INK)
    panels[0].text(2.0**-8, 0.8 * top, "subnormal", ha="center", va="center", color=INK)
    panels[1].set_xlabel("magnitude")
    return figure


def who_shares(axes: Any, name: str, color: str) -> None:
    """A matrix of 256 x 512, with the elements that share one scale in colour."""
    rows, cols = octavo.quantize(torch.ones(256, 512), granularity=name).granularity.block((256, 512))
    bare(axes)
    axes.set_xlim(-4, 516)
    axes.set_ylim(270, -4)
    for top in range(0, 256, max(rows, 16)):  # rows are drawn 16 high, or they could not be seen
        for left in range(0, 512, cols):
            face = color if not top and not left else "none"
            axes.add_patch(Rectangle((left, top), cols, max(rows, 16), facecolor=face, edgecolor=GREY, linewidth=0.6))
    axes.set_aspect("equal")
    axes.set_title(name)


def sqnr(x: Tensor, y: Tensor) -> float:
    """Energy of `x` over that of its error in `y`, in dB."""
    return float(10 * torch.log10(x.double().square().sum() / (x.double() - y.double()).square().sum()))


def int8(x: Tensor) -> Tensor:
    """`x` in INT8 with one scale for the tensor."""
    scale = x.abs().max() / 127
    return torch.round(x / scale) * scale


def with_outlier(size: float) -> Tensor:
    """A normal matrix [256, 512] with one element of `size`."""
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    x[3, 5] = size
    return x


def others(x: Tensor, y: Tensor) -> float:
    """The SQNR of all elements but the outlier."""
    kept = torch.ones_like(x, dtype=torch.bool)
    kept[3, 5] = False
    return sqnr(x[kept], y[kept])


def granularity() -> Figure:
    """Who shares a scale, and what an outlier costs the other elements."""
    figure, grid = canvas(4.6, rows=2, columns=4, height_ratios=(1, 2.6))
    for axes, (name, color) in zip(grid[0], GRANULARITIES.items(), strict=True):
        who_shares(axes, name, color)
    for axes in grid[1]:
        axes.remove()
    axes = figure.add_subplot(grid[1][0].get_gridspec()[1, :])
    exponents = range(2, 31)
    matrices = [with_outlier(2.0**e) for e in exponents]
    for name, color in GRANULARITIES.items():
        found = [others(x, octavo.quantize(x, granularity=name).dequantize()) for x in matrices]
        axes.plot(exponents, found, color=color, label=f"E4M3, {name}")
    axes.plot(exponents, [others(x, int8(x)) for x in matrices], color=GREY, linestyle="--", label="INT8, tensor")
    axes.set_xticks(range(5, 31, 5), [f"$2^{{{e}}}$" for e in range(5, 31, 5)])
    axes.set_xlabel("size of one outlier, in standard deviations of the others")
    axes.set_ylabel("SQNR of the others, dB")
    axes.legend(loc=(0.3, 0.08))
    return figure
