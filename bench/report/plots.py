"""The plots of docs/performance.md and docs/scaling.md. The same results give the same bytes.

Text stays text, there is no date, and the colours (Okabe and Ito's) differ for the colour-blind too.
"""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.gpu.modes import BASE
from bench.gpu.sharded import OURS, WIDE
from bench.report import scaling
from bench.report.front_page import gains
from bench.report.performance import by_mode
from bench.report.tables import Result

BLUE, ORANGE, GREY, GREEN, PINK = "#0072B2", "#E69F00", "#6E6E6E", "#009E73", "#CC79A7"
OWNERS = {"ours": BLUE, "torchao": ORANGE, "Transformer Engine": PINK, "bf16": GREY}
MODES = {"bf16": GREY, "rowwise": BLUE, "rowwise_if_faster": GREEN, "torchao": ORANGE}
STYLE = {
    "svg.hashsalt": "octavo",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(results: dict[str, Result], folder: Path) -> None:
    """Write gains.svg, stack.svg, parity.svg and network.svg to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for plot in (speed_gains, stack, parity, network):
        with matplotlib.rc_context(STYLE):
            path = folder / f"{plot.__name__.removeprefix('speed_')}.svg"
            plot(results).savefig(path, format="svg", metadata={"Date": None}, facecolor="white")
        lines = path.read_text().splitlines()  # matplotlib leaves spaces at their ends
        path.write_text("\n".join(line.rstrip() for line in lines) + "\n")


def speed_gains(results: dict[str, Result]) -> Any:
    """Speeds over compiled BF16: Octavo's, and torchao's where it was measured."""
    rows = gains(results)[::-1]  # the first on top
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        bars = [(0.2, row.to_bf16 or 0.0, BLUE, "white", "Octavo")]  # no bar where it was not measured
        if row.to_bf16 and row.to_torchao:
            bars.append((-0.2, row.to_bf16 / row.to_torchao, ORANGE, "black", "torchao"))
        for shift, speed, color, ink, label in bars:
            axes.barh(place + shift, speed, height=0.36, color=color, label=label if row is rows[-1] else None)
            axes.text(speed, place + shift, f"{speed:.2f} ", va="center", ha="right", color=ink)
    axes.axvline(1, color="black", linewidth=1, label="compiled BF16")
    axes.set_yticks(range(len(rows)), [row.what.partition(", ")[0] for row in rows])
    axes.set_xlabel("speed over compiled BF16")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def stack(results: dict[str, Result]) -> Any:
    """Milliseconds of a step, a bar a mode; BF16 and the floor as lines."""
    result = results["gpu_stack"]
    rows = result["modes"][::-1]  # the first on top
    figure = Figure(figsize=(8, 0.3 * len(rows) + 1.1), layout="constrained")
    axes = figure.subplots()
    owners = [owner(row["mode"]) for row in rows]
    colors = [OWNERS[name] for name in owners]
    axes.barh([row["mode"] for row in rows], [row["median"] for row in rows], color=colors, height=0.7)
    for place, (row, color) in enumerate(zip(rows, colors, strict=True)):
        ink = "black" if color == ORANGE else "white"
        axes.text(0.01 * rows[0]["median"], place, f" {row['median']:.1f}", va="center", color=ink)
    marks: list[Any] = [Patch(color=color, label=name) for name, color in OWNERS.items() if name in owners]
    floor = result["floors"]["cast"]["total"]
    for label, ms, line in ((BASE, by_mode(rows, "median")[BASE], "-"), ("floor", floor, "--")):
        axes.axvline(ms, color="black", linestyle=line, linewidth=1)
        marks.append(Line2D([], [], color="black", linestyle=line, linewidth=1, label=label))
    axes.set_xlabel("milliseconds, forward and backward")
    axes.margins(y=0.02)
    figure.legend(handles=marks, loc="outside upper center", ncols=len(marks), frameon=False)
    return figure


def owner(mode: str) -> str:
    return next(name for name in OWNERS if mode.startswith(name))


def parity(results: dict[str, Result]) -> Any:
    """The training loss of every run, and the gap of each to the BF16 run of its seed."""
    result = results["gpt_parity"]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    losses, gaps = figure.subplots(1, 2)
    curves = {(run["mode"], run["seed"]): run["curve"] for run in result["runs"]}
    for (mode, seed), curve in curves.items():
        tokens = [(i + 0.5) * result["tokens"] / len(curve) / 1e6 for i in range(len(curve))]
        style = {"color": MODES.get(mode, PINK), "linewidth": 0.8}
        losses.plot(tokens, curve, **style)
        if mode != "bf16" and ("bf16", seed) in curves:
            pairs = zip(curve, curves["bf16", seed], strict=True)
            gaps.plot(tokens, [100 * (loss / base - 1) for loss, base in pairs], **style)
    gaps.axhline(0, color=GREY, linewidth=1)
    losses.set_ylabel("training loss")
    gaps.set_ylabel("gap to BF16 of the same seed, %")
    for axes in (losses, gaps):
        axes.set_xlabel("million tokens")
    names = list(dict.fromkeys(mode for mode, _ in curves))
    marks = [Line2D([], [], color=MODES.get(name, PINK), label=name) for name in names]
    figure.legend(handles=marks, loc="outside upper center", ncols=len(marks), frameon=False)
    return figure


def network(results: dict[str, Result]) -> Any:
    """The gain of the all-gather in FP8 over the bandwidth of the network: measured, and by the model."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    found = scaling.trainings(results)
    for other, color in ((WIDE, BLUE), (BASE, GREY)):
        for run, marker, line in zip(scaling.runs(results, "gpu_network_"), "os", ("-", "--"), strict=False):
            speeds = {
                each["bytes_per_second"]: scaling.gain(each["rounds"], OURS, other) or 0.0 for each in run["links"]
            }
            axes.plot([rate / 1e9 for rate in speeds], list(speeds.values()), marker, color=color)
            rates = np.geomspace(min(speeds) / 2, max(speeds) * (2 if marker == "s" else 1), 60)
            slow, fast = (
                [scaling.at_bandwidth(run, mode, found[mode][1], rate) for rate in rates] for mode in (other, OURS)
            )
            axes.plot(rates / 1e9, np.divide(slow, fast), line, color=color, linewidth=1)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    ticks = [2, 5, 10, 20, 50, 100, 200]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("GB/s that a GPU receives in an all-gather")
    axes.set_ylabel("speed of rowwise, gathered in FP8")
    marks = [Line2D([], [], color=color, label=f"over {mode}") for mode, color in ((WIDE, BLUE), (BASE, GREY))]
    links = {"NVLink, fewer channels": "o-", "sockets": "s--"}  # a point is measured, a line is the model's
    marks += [
        Line2D([], [], color="black", marker=style[0], linestyle=style[1:], linewidth=1, label=name)
        for name, style in links.items()
    ]
    figure.legend(handles=marks, loc="outside upper center", ncols=4, frameon=False)
    return figure
