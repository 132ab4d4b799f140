"""The three GEMMs of a linear layer, and where the scales of the rows stand in each."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from bench.figures.style import BLUE, INK, LIGHT, ORANGE, PALE_BLUE, bare, canvas

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
        axes.set_xlim(0, 10.8)
        axes.set_ylim(-0.9, 1.15)
        axes.set_aspect("equal")
        axes.axhline(-0.9, color=LIGHT, linewidth=0.8)
        outside = {side: scale for _, _, strips in (a, b) for side, scale in strips.items() if scale[1] == BLUE}
        matrix(axes, (0.6, 0), shape, name, outside if name != "dw" else {})
        axes.text(2.2, 0, "=", ha="center", va="center", fontsize=12)
        matrix(axes, (3.1, 0), a[1], a[0], a[2])
        axes.text(4.85, 0, "×", ha="center", va="center", fontsize=12)
        matrix(axes, (5.75, 0), b[1], b[0], b[2])
        axes.text(7.1, 0, f"sum over {axis}:\n{words}", va="center")
    return figure
