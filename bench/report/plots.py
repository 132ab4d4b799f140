"""The plots of docs/performance.md and docs/scaling.md. The same results give the same bytes.

Text stays text, there is no date, and the colours (Okabe and Ito's) differ for the colour-blind too.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.lines import Line2D

from bench.figures.style import PLAIN, canvas, save
from bench.gpu.modes import BASE, OURS, WIDE, speedup
from bench.report import loss as loss_page
from bench.report import scaling
from bench.report.filler import Result
from bench.report.performance import front, layer_cells, layer_sizes

BLUE, ORANGE, GREY, GREEN, PINK = "#0072B2", "#E69F00", "#6E6E6E", "#009E73", "#CC79A7"
MODES = {"bf16": GREY, "rowwise": BLUE, "rowwise_if_faster": GREEN, "torchao": ORANGE}


def draw(results: dict[str, Result], folder: Path) -> None:
    """Write gains.svg, loss.svg, network.svg, linear.svg and layer.svg to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for plot in (speed_gains, loss, network, linear, layer):
        save(partial(plot, results), folder / f"{plot.__name__.removeprefix('speed_')}.svg", PLAIN)


def speed_gains(results: dict[str, Result]) -> Any:
    """Speeds over compiled BF16: Octavo's, and torchao's where it was measured."""
    rows = front(results)[::-1]  # the first on top
    figure, axes = canvas(0.6 * len(rows) + 1)
    for place, row in enumerate(rows):
        bars = [(0.2, row.to_bf16, BLUE, "Octavo")]
        if row.to_torchao:  # measured
            bars.append((-0.2, row.to_bf16 / row.to_torchao, ORANGE, "torchao"))
        for shift, speed, color, label in bars:
            axes.barh(place + shift, speed, height=0.36, color=color, label=label if row is rows[-1] else None)
            label_box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # the line at 1 does not cross digits
            axes.text(speed + 0.02, place + shift, f"{speed:.2f}", va="center", bbox=label_box, zorder=3)
    axes.axvline(1, color="black", linewidth=1, label="compiled BF16")
    axes.set_yticks(range(len(rows)), [row.what.partition(", ")[0] for row in rows])
    axes.set_xlabel("speed over compiled BF16")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def loss(results: dict[str, Result]) -> Any:
    """The method: a trunk with the branches of one data order; and the gap of each mode with its interval."""
    study = loss_page.main(results)
    figure, (curves, gaps) = canvas(3.6, columns=2, width=9)
    trunk, branches = study.runs.trunk, study.runs.branches
    order, lowest = min(run.order for run in branches), math.inf
    for run, color in ((trunk, "black"), *((run, MODES.get(run.mode, PINK)) for run in branches if run.order == order)):
        window = max(len(run.losses) // 40, 1)
        smooth = np.convolve(run.losses, np.ones(window) / window, "valid")
        first = run.get("first", 0) + window // 2
        curves.plot(range(first, first + len(smooth)), smooth, color=color, linewidth=0.9, alpha=0.8)
        lowest = min(lowest, smooth.min())
    curves.axvline(study.branch.step, color=GREY, linestyle="--", linewidth=1)
    curves.set(ylim=(0.98 * lowest, 1.5 * lowest), ylabel="training loss, smoothed")
    curves.set_xlabel(f"step; branches of data order {order} from step {study.branch.step:,}")
    marks = []
    for form, shift, color in (("bf16", 0.15, GREY), ("fp8", -0.15, BLUE)):
        marks.append(Line2D([], [], color=color, marker="o", linewidth=0, label=f"weights in {form.upper()}"))
        for place, row in enumerate(reversed(study.modes.values())):
            if gap := row.get(form):
                error = None if gap.half is None else 100 * gap.half
                gaps.errorbar(100 * gap.gap, place + shift, xerr=error, fmt="o", color=color, markersize=4, capsize=2)
    gaps.axvline(0, color="black", linewidth=1)
    names = [loss_page.named(mode).replace("`", "") for mode in study.modes]
    gaps.set_yticks(range(len(names)), names[::-1])
    gaps.set_xlabel("gap to BF16, %, with its 95 % interval")
    figure.legend(handles=marks, loc="outside upper center", ncols=2, frameon=False)
    return figure


def network(results: dict[str, Result]) -> Any:
    """The gain of the all-gather in FP8 over the bandwidth of the network: measured, and by the model."""
    figure, axes = canvas(3.2)
    found = scaling.trainings(results)
    for other, color in ((WIDE, BLUE), (BASE, GREY)):
        for run, marker, line in zip(scaling.runs(results, "gpu_network_"), "os", ("-", "--"), strict=False):
            speeds = {each["bytes_per_second"]: speedup(each, OURS, other) for each in run["links"]}
            axes.plot([rate / 1e9 for rate in speeds], list(speeds.values()), marker, color=color)
            rates = np.geomspace(min(speeds) / 2, max(speeds) * (2 if marker == "s" else 1), 60)
            slow, fast = (
                [scaling.at_bandwidth(run, mode, found[mode], rate) for rate in rates] for mode in (other, OURS)
            )
            axes.plot(rates / 1e9, np.divide(slow, fast), line, color=color, linewidth=1)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    ticks = [2, 5, 10, 20, 50, 100, 200]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel="GB/s that a GPU receives in an all-gather", ylabel="speed of rowwise, gathered in FP8")
    marks = [Line2D([], [], color=color, label=f"over {mode}") for mode, color in ((WIDE, BLUE), (BASE, GREY))]
    links = {"NVLink, fewer channels": "o-", "sockets": "s--"}  # a point is measured, a line is the model's
    marks += [
        Line2D([], [], color="black", marker=style[0], linestyle=style[1:], linewidth=1, label=name)
        for name, style in links.items()
    ]
    figure.legend(handles=marks, loc="outside upper center", ncols=4, frameon=False)
    return figure


def linear(_: dict[str, Result]) -> Any:
    """The speed of a linear layer by `rowwise`, over that in BF16, by its size."""
    rows = [(row.M, row.K, row.N, row.speedup) for row in layer_sizes() if row.recipe == "rowwise"]
    return heat_maps(rows, "rowwise, speed over BF16")


def layer(results: dict[str, Result]) -> Any:
    """The speed of norm, linear layer and sigmoid by size."""
    cells = layer_cells(results["gpu_layer"]["cells"])
    return heat_maps([(row["M"], row["K"], row["N"], row["ours"]) for row in cells], "ours, speed over BF16")


def heat_maps(rows: list[tuple[int, int, int, float]], title: str) -> Any:
    """A map of speeds over K and N for each M: blue is faster than BF16, orange slower."""
    speeds = {row[:3]: row[3] for row in rows}
    sizes_of_m, sizes_of_k, sizes_of_n = (sorted({key[axis] for key in speeds}) for axis in range(3))
    columns = 3 if len(sizes_of_m) % 3 == 0 else 2
    lines = math.ceil(len(sizes_of_m) / columns)
    figure, panels = canvas(2.7 * lines, lines, columns, width=3 * columns, sharex=True, sharey=True)
    colors = LinearSegmentedColormap.from_list("speeds", [ORANGE, "white", BLUE])
    for m, axes in zip(sizes_of_m, panels.flat, strict=True):
        values = [[speeds[m, k, n] for n in sizes_of_n] for k in sizes_of_k]
        axes.pcolormesh(values, cmap=colors, vmin=0.2, vmax=1.8)
        for (row, column), speed in np.ndenumerate(values):
            axes.text(column + 0.5, row + 0.5, f"{speed:.2f}", ha="center", va="center", fontsize=7)
        axes.set_title(f"M = {m:,}", fontsize=9)
        for ticks, sizes in ((axes.set_xticks, sizes_of_n), (axes.set_yticks, sizes_of_k)):
            ticks([place + 0.5 for place in range(len(sizes))], [f"{size // 1024}k" for size in sizes])
    figure.supxlabel("outputs N", fontsize=9)
    figure.supylabel("inputs K", fontsize=9)
    figure.suptitle(title, fontsize=10)
    return figure
