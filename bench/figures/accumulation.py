"""What is lost when the partial sums of a long reduction have few bits: a model, beside GEMMs measured on an H100.

The model of a tensor core: an instruction adds STEP products to a partial sum. All are aligned to the largest of them,
and cut FRACTION bits below its leading bit. Without fast accumulation the partial sum moves to a float32 sum after
every PROMOTED products. Source: about 14 bits are reported by DeepSeek-V3 (arXiv:2412.19437, section 3.3.2); the other
two were chosen by comparison with the measurements.
"""

from collections.abc import Callable

import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

import octavo
from bench.figures.scales import sqnr
from bench.figures.style import BLUE, GREY, INK, ORANGE, canvas
from bench.report.filler import load

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
    return sqnr(terms.sum(1), partial_sums(terms, fast=fast)[:, -1])


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
    left.set_title("the error of one sum of positive products, %")
    left.set_xlabel("products so far")
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
    right.set_title("SQNR of a GEMM's sums, dB")
    right.set_xlabel("products in a sum")
    right.set_ylim(0, 92)
    return figure
