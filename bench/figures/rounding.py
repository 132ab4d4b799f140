"""Rounding to nearest, and stochastic rounding, which is dithering."""

from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from bench.figures.style import BLUE, GREY, INK, ORANGE, canvas
from octavo.numerics.formats import BF16, decode, encode

LEVELS = 4  # steps between black and white
STEPS, UPDATE, RUNS = 400, 0.001, 200


def updated(noise: Tensor | None) -> Tensor:
    """BF16 weights of 1 after each of STEPS updates of UPDATE [STEPS, runs], rounded to nearest or by `noise`."""
    weights = [torch.ones(1 if noise is None else noise.shape[1])]
    for i in range(STEPS):
        w = weights[-1].double() + UPDATE
        weights.append(decode(encode(w, BF16, None if noise is None else noise[i]), BF16))
    return torch.stack(weights[1:])


def grey_ramp(axes: Any, noise: Tensor) -> None:
    """A ramp from black to white in few levels; `noise` [rows, columns] below 1 is added before rounding down."""
    rows, columns = noise.shape
    ramp = torch.linspace(0, LEVELS, columns)
    levels = (ramp + noise).floor().clamp(max=LEVELS)
    for row in range(rows):
        starts = [0, *((levels[row].diff() != 0).nonzero().flatten() + 1).tolist()]
        for left, right in zip(
            starts, [*starts[1:], columns], strict=True
        ):  # a rectangle for a run; rows overlap, without a seam
            shade = str(min(float(levels[row, left]) / LEVELS, 0.996))  # white that is not the paper's
            axes.add_patch(Rectangle((left, row), right - left, 1.2, facecolor=shade, linewidth=0))
    axes.set_xlim(0, columns)
    axes.set_ylim(0, rows)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(True)  # the last level is white, as the page may be


def rounding() -> Figure:
    """Above: a ramp of grey in five levels. Below: many small updates of a weight in BF16."""
    figure, grid = canvas(4.4, rows=3, columns=1, height_ratios=(1, 1, 4.5))
    generator = torch.Generator().manual_seed(0)
    grey_ramp(grid[0], torch.full((12, 200), 0.5))
    grid[0].set_title(f"from black to white in {LEVELS + 1} levels: rounded to nearest, in bands")
    grey_ramp(grid[1], torch.rand(12, 200, generator=generator))
    grid[1].set_title("rounded stochastically: grainy, and right on average")
    axes = grid[2]
    steps = torch.arange(1, STEPS + 1)
    axes.plot(steps.tolist(), (1 + UPDATE * steps).tolist(), color=GREY, linestyle="--", label="exact")
    axes.plot(steps.tolist(), updated(None).tolist(), color=ORANGE, label="rounded to nearest")
    runs = updated(torch.rand(STEPS, RUNS, generator=generator))
    axes.plot(
        steps.tolist(),
        runs[:, :3].tolist(),
        color=BLUE,
        linewidth=0.7,
        label=["rounded stochastically, 3 runs", None, None],
    )
    axes.plot(steps.tolist(), runs.mean(1).tolist(), color=BLUE, linewidth=2, label=f"mean of {RUNS} runs")
    axes.set_title(f"a BF16 weight of 1, to which {UPDATE} is added {STEPS} times", color=INK)
    axes.set_xlabel("updates")
    axes.legend(loc="upper left")
    return figure
