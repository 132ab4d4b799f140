"""How the pictures of docs/figures look. The same numbers give the same bytes.

A picture is drawn in the colours for a light page. A style sheet inside the file replaces them where the reader prefers
a dark one, so one file serves both, and a program that ignores the style sheet shows the light picture. Text stays
text. The colours are Okabe and Ito's, which differ for the colour-blind too.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

INK, PAPER, GREY, LIGHT = "#1f2328", "#ffffff", "#6e6e6e", "#d8dee4"
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#007a59", "#b0588a"
PALE_BLUE, PALE_ORANGE = "#cfe5f3", "#fbe0cc"
DARK = {
    INK: "#e6edf3",
    PAPER: "#131416",
    GREY: "#a0a8b0",
    LIGHT: "#3a4048",
    BLUE: "#56b4e9",
    ORANGE: "#ff9d4d",
    GREEN: "#34d399",
    PINK: "#e59ac4",
    PALE_BLUE: "#12384f",
    PALE_ORANGE: "#512c12",
}
PLAIN = {
    "svg.hashsalt": "octavo",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
STYLE = PLAIN | {
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "legend.frameon": False,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
Draw = Callable[[], Figure]


def save(draw: Draw, path: Path, style: dict[str, Any] = STYLE) -> None:
    """Write the figure that `draw` makes to `path`, by its suffix: an SVG file of the style of this page in both
    colours, and any other file in the light ones."""
    with matplotlib.rc_context(style):
        draw().savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    if path.suffix == ".svg":
        lines = [line.rstrip() for line in path.read_text().splitlines()]  # matplotlib leaves spaces at their ends
        sheet = [f"<style>{style_sheet()}</style>"] if style is STYLE else []
        end = lines.index("</svg>")
        path.write_text("\n".join([*lines[:end], *sheet, *lines[end:]]) + "\n")


def style_sheet() -> str:
    """The dark colours, as rules that replace the light ones in `style` attributes."""
    rules = (
        f'[style*="{attribute}: {light}"]{{{attribute}:{dark}!important}}'
        for light, dark in DARK.items()
        for attribute in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme:dark){{{''.join(rules)}}}"


def canvas(height: float, rows: int = 1, columns: int = 1, width: float = 8, **layout: Any) -> tuple[Figure, Any]:
    """A figure of `width` x `height` inches, by default as wide as a page, and its axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **layout)


def bare(axes: Any) -> None:
    """Leave out the frame and the ticks of `axes`."""
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)
