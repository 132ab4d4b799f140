"""Products of quantized matrices: where the scales of rows stand in each GEMM, and what accumulation loses."""

from collections.abc import Callable
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from torch import Tensor

import octavo
from bench.figures.style import BLUE, GREY, INK, LIGHT, ORANGE, PALE_BLUE, bare, canvas
from bench.gpu import harness
from bench.report.filler import load

# --- The three GEMMs of a linear layer ------------------------------------------------------------------------------

SIZES = {"T": 1.5, "K": 1.1, "N": 0.8}  # the lengths of the axes as drawn
STRIP = 0.12


def matrix(axes: Any, place: tuple[float, float], shape: str, name: str, strips: dict[str, tuple[str, str]]) -> float:
    """A matrix whose axes are the two letters of `shape`, with strips of scales beside it; its width.

    Args:
        place: its left end, and its middle.
        strips: for "left" or "top", the name of the scales and their colour.
    """
    left, middle = place
    height, width = SIZES[shape[0]], SIZES[shape[1]]
    top = middle + height / 2
    axes.add_patch(Rectangle((left, top - height), width, height, facecolor=PALE_BLUE, edgecolor=INK, linewidth=0.8))
    axes.text(left + width / 2, middle, f"{name}\n[{shape[0]}, {shape[1]}]", ha="center", va="center")
    for side, (scale, color) in strips.items():
        x, y = (left - 1.7 * STRIP, top - height) if side == "left" else (left, top + 0.7 * STRIP)
        size = (STRIP, height) if side == "left" else (width, STRIP)
        axes.add_patch(Rectangle((x, y), *size, facecolor=color, edgecolor="none"))
        at = (x - 0.05, middle) if side == "left" else (left + width / 2, y + STRIP + 0.04)
        align = {"ha": "right", "va": "center"} if side == "left" else {"ha": "center", "va": "bottom"}
        axes.text(*at, scale, color=color, **align)
    return width


def one_quantization() -> Figure:
    """y, dx and dw from the same bytes: blue scales stand outside the sum, orange ones inside."""
    figure, panels = canvas(5.0, rows=3)
    gemms = [
        ("y", "TN", ("x", "TK", {"left": ("s_x", BLUE)}), ("wᵀ", "KN", {"top": ("s_w", BLUE)}),
         "K", "both scales are factors of the result"),
        ("dx", "TK", ("g", "TN", {"left": ("s_g", BLUE)}), ("w", "NK", {"left": ("s_w", ORANGE)}),
         "N", "s_w would stand inside the sum:\nit is multiplied into dy, and the\nresult g is quantized"),
        ("dw", "NK", ("gᵀ", "NT", {"top": ("s_g", ORANGE)}), ("x", "TK", {"left": ("s_x", ORANGE)}),
         "T", "s_g and s_x would stand inside the sum:\nthe mantissa of s_x is multiplied into dy too;\n"
              "what is left are powers of two, which\nchange only exponents of the bytes of g"),
    ]  # fmt: skip
    for axes, (name, shape, a, b, axis, words) in zip(panels, gemms, strict=True):
        bare(axes)
        axes.set(xlim=(0, 10.8), ylim=(-0.9, 1.15), aspect="equal")
        axes.axhline(-0.9, color=LIGHT, linewidth=0.8)
        outside = {side: scale for _, _, strips in (a, b) for side, scale in strips.items() if scale[1] == BLUE}
        matrix(axes, (0.6, 0), shape, name, outside if name != "dw" else {})
        axes.text(2.2, 0, "=", ha="center", va="center", fontsize=12)
        matrix(axes, (3.1, 0), a[1], a[0], a[2])
        axes.text(4.85, 0, "×", ha="center", va="center", fontsize=12)
        matrix(axes, (5.75, 0), b[1], b[0], b[2])
        axes.text(7.1, 0, f"sum over {axis}:\n{words}", va="center")
    return figure


# --- Partial sums of few bits ---------------------------------------------------------------------------------------
#
# What is lost when the partial sums of a long reduction have few bits: a model, beside GEMMs measured on an H100.
#
# The model of a tensor core: an instruction adds STEP products to a partial sum. All are aligned to the largest of
# them, and cut FRACTION bits below its leading bit. Without fast accumulation the partial sum moves to a float32 sum
# after every PROMOTED products. Source: about 14 bits are reported by DeepSeek-V3 (arXiv:2412.19437, section 3.3.2);
# the other two were chosen by comparison with the measurements.

STEP, FRACTION, PROMOTED = 32, 13, 128
LENGTHS = (4096, 8192, 28672)
DATA: dict[str, Callable[[Tensor], Tensor]] = {"normal": lambda x: x, "all of one sign": torch.abs}


def products(data: str, length: int) -> Tensor:
    """Products of two E4M3 matrices, by element: float64 [64, length], exact."""
    generator = torch.Generator().manual_seed(0)
    a, b = (octavo.quantize(DATA[data](torch.randn(64, length, generator=generator))).data.double() for _ in range(2))
    return a * b


def add(partial: Tensor, terms: Tensor) -> Tensor:
    """`partial` [n] plus the sums of `terms` [n, STEP] as the tensor core adds them."""
    aligned = torch.cat((partial[:, None], terms), 1)
    leading = torch.frexp(aligned.abs().amax(1, keepdim=True)).exponent - 1
    unit = torch.ldexp(torch.ones_like(leading, dtype=torch.float64), leading - FRACTION)
    return ((aligned / unit).trunc() * unit).sum(1)


def partial_sums(terms: Tensor, *, fast: bool) -> Tensor:
    """The sums of `terms` [n, length] after each STEP of them, [n, length / STEP]."""
    total = torch.zeros(len(terms), dtype=torch.float64)
    partial, sums = torch.zeros_like(total), []
    for i, part in enumerate(torch.split(terms, STEP, 1), start=1):
        partial = add(partial, part)
        if not fast and i * STEP % PROMOTED == 0:
            total, partial = (total + partial).float().double(), torch.zeros_like(partial)
        sums.append(total + partial)
    return torch.stack(sums, 1)


def decibels(data: str, length: int, *, fast: bool) -> float:
    """The SQNR of the model's sums."""
    terms = products(data, length)
    return harness.decibels(terms.sum(1), partial_sums(terms, fast=fast)[:, -1])


def accumulation() -> Figure:
    """Left: how one sum goes wrong. Right: the error of the model, and that of GEMMs."""
    figure, (left, right) = canvas(3.4, columns=2)
    terms = products("all of one sign", LENGTHS[-1])[:1]
    exact = terms.view(-1, STEP).sum(1).cumsum(0)
    places = range(STEP, LENGTHS[-1] + 1, STEP)
    colors = {True: ORANGE, False: BLUE}
    labels = {True: f"fast accumulation: {FRACTION + 1} bits", False: f"promoted to float32 after every {PROMOTED}"}
    for fast, color in colors.items():
        error = partial_sums(terms, fast=fast)[0] / exact - 1
        left.plot(places, (100 * error).tolist(), color=color, label=labels[fast])
    left.set(title="the error of one sum of positive products, %", xlabel="products so far")
    left.legend(loc="lower left")
    measured = load()["gpu_ceilings"]["accumulation"]
    for data, dashes in zip(DATA, ("-", "--"), strict=True):
        for fast, color in colors.items():
            curve = [decibels(data, length, fast=fast) for length in LENGTHS]
            right.plot(LENGTHS, curve, dashes, color=color)
            right.text(LENGTHS[-1], curve[-1] + 2, data, ha="right", va="bottom", color=color)
            points = [row["fast" if fast else "promoted"]["gemm"] for row in measured if row["data"] == data]
            right.plot(LENGTHS, points, "o", markersize=4, color=color)
    quantized = next(row["promoted"]["whole"] for row in measured if row["data"] == "normal")
    right.axhline(quantized, color=GREY, linewidth=0.8)
    right.text(LENGTHS[0], quantized + 1, f"quantization to E4M3, {quantized:.1f}", color=GREY, va="bottom")
    marks = [Line2D([], [], color=INK, label="model"), Line2D([], [], color=INK, marker="o", ls="", label="H100")]
    right.legend(handles=marks, loc="lower left", ncols=2)
    right.set(title="SQNR of a GEMM's sums, dB", xlabel="products in a sum", ylim=(0, 92))
    return figure
