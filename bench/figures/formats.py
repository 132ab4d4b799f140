"""The formats as numbers on a line, and as range against precision."""

from collections.abc import Callable

import torch
from matplotlib.figure import Figure
from torch import Tensor

from bench.figures.style import BLUE, GREEN, GREY, INK, LIGHT, ORANGE, PINK, bare, canvas
from octavo.numerics.formats import BF16, E4M3, E5M2, FP16, Format, decode, encode

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
        axes.set_xlim(-0.01 * end, 1.16 * end)
        axes.set_title(f"from 0 to {labels[-1]}")
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
    axes.set_xlim(-31, 26)
    axes.set_ylabel("largest error of rounding")
    axes.set_xlabel("size of the number")
    return figure
