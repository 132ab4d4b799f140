"""Pictures of the learning path, from the code on its pages."""

import argparse
import contextlib
import inspect
import io
import re
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.figures.style import BLUE, GREEN, INK, LIGHT, ORANGE, PALE_BLUE, canvas
from octavo.numerics.formats import FP16

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
