"""Numbers in few bits: the formats, rounding, scales and who shares them, a rotation, and loss scaling."""

import argparse
import contextlib
import inspect
import io
import re
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

import octavo
from bench.figures.style import BLUE, GREEN, GREY, INK, LIGHT, ORANGE, PALE_BLUE, PINK, bare, canvas
from bench.gpu import harness
from octavo.numerics.formats import BF16, E4M3, E5M2, FP16, Format, decode, encode
from octavo.numerics.scaling import hadamard

# --- The formats as numbers on a line, and as range against precision -----------------------------------------------

COLORS = {"e4m3": BLUE, "e5m2": ORANGE, "bf16": GREEN, "fp16": PINK, "int8": GREY}


def numbers(fmt: Format) -> Tensor:
    """The numbers of an eight-bit format from 0 to its largest, in order."""
    return decode(torch.arange(fmt.max_code + 1), fmt)


def number_line() -> Figure:
    """Every number of E4M3, E5M2 and INT8 between 0 and an end: the same line at three sizes."""
    figure, panels = canvas(3.9, rows=3)
    rows = {"int8": torch.arange(128) * E4M3.max / 127, "e5m2": numbers(E5M2), "e4m3": numbers(E4M3)}
    for axes, end in zip(panels, (E4M3.max, 4.0, 2.0**-5), strict=True):
        for place, (name, values) in enumerate(rows.items()):
            inside = values[values <= end]
            axes.hlines(place, 0, end, color=LIGHT, linewidth=0.8)
            axes.vlines(inside.tolist(), place - 0.3, place + 0.3, color=COLORS[name], linewidth=0.9)
            axes.text(1.02 * end, place, f"{len(inside)} number{'s' * (len(inside) > 1)}", va="center", color=INK)
        bare(axes)
        axes.set_yticks(range(3), ["INT8 times 448/127", "E5M2", "E4M3"])
        axes.tick_params(length=0)
        ticks = [end * i / 4 for i in range(5)]
        labels = [f"{i}/128" if end < 1 else f"{tick:g}" for i, tick in enumerate(ticks)]
        axes.set_xticks(ticks, labels)
        axes.set(xlim=(-0.01 * end, 1.16 * end), title=f"from 0 to {labels[-1]}")
    return figure


def largest_error(rounded: Callable[[Tensor], Tensor], exponent: int, most: float) -> float:
    """The largest relative error of `rounded` in a binade, [2^e, 2^(e+1)), up to `most`."""
    x = (1 + (torch.arange(4096).double() + 0.5) / 4096) * 2.0**exponent
    x = x[x <= most]
    return float(((rounded(x) - x).abs() / x).max())


def to_format(fmt: Format) -> Callable[[Tensor], Tensor]:
    """float64 numbers, rounded to `fmt`."""
    return lambda x: decode(encode(x, fmt), fmt).double()


def range_and_precision() -> Figure:
    """The largest relative error of rounding, against the size of the number."""
    figure, axes = canvas(3.4)
    lines = [(fmt.name, to_format(fmt), fmt.smallest_subnormal / 4, fmt.max) for fmt in (E5M2, E4M3, BF16, FP16)]
    lines.append(("int8", torch.round, 0.25, 127.0))
    for name, rounded, least, most in lines:
        inside = [e for e in range(-30, 20) if least < 2.0**e <= most]
        errors = [100 * largest_error(rounded, e, most) for e in inside]
        dashed = "--" if name == "int8" else "-"
        edges = [*inside, inside[-1] + 1]
        axes.stairs(errors, edges, baseline=None, color=COLORS[name], linewidth=2, linestyle=dashed)
        axes.text(edges[-1] + 0.3, min(errors), f"{name.upper()}, {min(errors):.2g} %", va="center", color=COLORS[name])
    axes.set_yscale("log")
    axes.set_yticks([100, 10, 1, 0.1], ["100 %", "10 %", "1 %", "0.1 %"])
    axes.set_xticks(range(-30, 21, 5), [f"$2^{{{e}}}$" for e in range(-30, 21, 5)])
    axes.set(xlim=(-31, 26), ylabel="largest error of rounding", xlabel="size of the number")
    return figure


# --- Rounding to nearest, and stochastic rounding, which is dithering -----------------------------------------------

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
    levels = (torch.linspace(0, LEVELS, columns) + noise).floor().clamp(max=LEVELS)
    for row in range(rows):
        starts = [0, *((levels[row].diff() != 0).nonzero().flatten() + 1).tolist()]
        for left, right in pairwise([*starts, columns]):  # a rectangle for a run; rows overlap, without a seam
            shade = str(min(float(levels[row, left]) / LEVELS, 0.996))  # white that is not the paper's
            axes.add_patch(Rectangle((left, row), right - left, 1.2, facecolor=shade, linewidth=0))
    axes.set(xlim=(0, columns), ylim=(0, rows), xticks=[], yticks=[])
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
    labels = ["rounded stochastically, 3 runs", None, None]
    axes.plot(steps.tolist(), runs[:, :3].tolist(), color=BLUE, linewidth=0.7, label=labels)
    axes.plot(steps.tolist(), runs.mean(1).tolist(), color=BLUE, linewidth=2, label=f"mean of {RUNS} runs")
    axes.set_title(f"a BF16 weight of 1, to which {UPDATE} is added {STEPS} times", color=INK)
    axes.set_xlabel("updates")
    axes.legend(loc="upper left")
    return figure


# --- A scale moves a tensor into the range of a format; the granularity says how many elements share it -------------

GRANULARITIES = {"tensor": ORANGE, "row": BLUE, "group:128": GREEN, "block:128x128": PINK}


def gradients() -> Tensor:
    """Numbers as small as gradients often are, spread over many binades: float32 [65536]."""
    generator = torch.Generator().manual_seed(0)
    return 5e-4 * torch.randn(65536, generator=generator) * torch.randn(65536, generator=generator).exp()


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
        lost = float((values.to(E4M3.dtype).float() == 0).float().mean())
        axes.set(title=f"{title}: {100 * lost:.1f} % of the numbers become 0 in E4M3", yticks=[])
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
    axes.set(xlim=(-4, 516), ylim=(270, -4))
    for top in range(0, 256, max(rows, 16)):  # rows are drawn 16 high, or they could not be seen
        for left in range(0, 512, cols):
            face = color if not top and not left else "none"
            axes.add_patch(Rectangle((left, top), cols, max(rows, 16), facecolor=face, edgecolor=GREY, linewidth=0.6))
    axes.set(aspect="equal", title=name)


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
    return harness.decibels(x[kept], y[kept])


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
    axes.set(xlabel="size of one outlier, in standard deviations of the others", ylabel="SQNR of the others, dB")
    axes.legend(loc=(0.3, 0.08))
    return figure


# --- A Hadamard rotation spreads an outlier over its row ------------------------------------------------------------

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
    return harness.decibels(x @ w.t(), q @ b.t())


def rotation() -> Figure:
    """One token before and after, the numbers of a longer one, and what the product gains."""
    figure, axes_of = canvas(4.6, rows=2, columns=2)
    grid = list(axes_of.flat)
    x = tokens()
    for axes, values, title in zip(grid, (x, hadamard(x)), ("a token", "the same token, rotated"), strict=False):
        axes.bar(range(WIDTH), values[0].abs().tolist(), width=1, color=BLUE)
        axes.set(title=title, ylim=(0, 1.05 * float(x[0].abs().max())), xlabel="channel", ylabel="magnitude")
    long = torch.randn(4096, generator=torch.Generator().manual_seed(2))
    long[CHANNEL] = 5.0 * len(long) ** 0.5  # its only outlier: rotated, the numbers lie around 5 and -5
    grid[2].hist(hadamard(long).tolist(), bins=60, color=BLUE)
    grid[2].set(title="4,096 channels, rotated", xlabel="number", ylabel="channels")
    gains(grid[3], x)
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
    axes.set(ylim=(0, 75), title="SQNR of the product, dB")
    axes.legend(loc="upper center", ncols=2)


# --- The gradients and the losses of docs/learn, by the code on its pages -------------------------------------------

BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
LESSONS = Path(__file__).parents[2] / "docs" / "learn"


def run(*pages: str) -> dict[str, Any]:
    """The names that the Python blocks of the pages define, with the source of argparse as `book.txt`."""
    names: dict[str, Any] = {"__name__": "lessons"}
    quiet = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), quiet:
        Path("book.txt").write_text(inspect.getsource(argparse))
        for page in pages:
            for block in BLOCK.findall((LESSONS / page).read_text()):
                exec(block, names)
    return names


def loss_scaling() -> Figure:
    """Left: the gradients over the range of FP16. Right: the losses with loss scaling and without."""
    names = run("1_gpt.md", "2_loss_scaling.md")
    figure, (left, right) = canvas(3.2, columns=2)
    sizes = names["gradients"](1.0, names["torch"].bfloat16).abs().tolist()
    bins = [2.0**e for e in range(-40, 1)]
    left.hist(sizes, bins, color=ORANGE, label="as they are")
    left.hist([size * 2.0**14 for size in sizes], bins, histtype="step", color=BLUE, linewidth=1.5, label="times 16384")
    left.axvspan(FP16.smallest_normal, bins[-1], color=PALE_BLUE, zorder=0, linewidth=0)
    left.axvspan(FP16.smallest_subnormal / 2, FP16.smallest_normal, color=LIGHT, zorder=0, linewidth=0)
    left.set_xscale("log", base=2)
    left.set(xlim=(bins[0], bins[-1]), ylim=(0, 1.35 * left.get_ylim()[1]), yticks=[])
    top = left.get_ylim()[1]
    for place, words in ((-32.5, "0 in FP16"), (-19.5, "subnormal"), (-7, "normal in FP16")):
        left.text(2.0**place, 0.72 * top, words, ha="center", color=INK)
    left.set_title("gradients of the first step")
    left.legend(loc="upper left", ncols=2)
    curves = names["curves"].items()
    for (name, losses), color, dashes in zip(curves, (GREEN, BLUE, ORANGE), ("-", "--", "-"), strict=True):
        right.plot(range(1, len(losses) + 1), losses, dashes, color=color, label=name)
    right.set(title="loss, nats a byte", xlabel="step", ylim=(0, 6))
    right.legend(loc="lower left")
    return figure
