"""The sections of docs/performance.md on one layer and on a whole training run; `gpu_tables.py` writes the document."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from bench.report.aims import ONLY_IF_FASTER, Result, gains, paired, ratio
from bench.report.tables import details, grid, machine, number

# --- One layer -------------------------------------------------------------------------------------------------


def layer(result: Result) -> list[str]:
    cells = result["cells"]
    modes = list(dict.fromkeys(mode for cell in cells for mode in cell["rounds"] if mode != "bf16"))
    slower = sum(gain < 1 for gain in gains(cells, "ours", "torchao"))
    below = sum(gain < ONLY_IF_FASTER for gain in gains(cells, "ours, only if faster", "bf16"))
    words = (
        f"{len(cells)} of {result['of']} cells measured. Ours is slower than torchao in {slower} of "
        f"{len(gains(cells, 'ours', 'torchao'))}; only if faster is below {ONLY_IF_FASTER}x BF16 in {below} of "
        f"{len(gains(cells, 'ours, only if faster', 'bf16'))}."
    )
    ranges = [
        [mode, *(f"{value:.3f}x" for value in (min(found), statistics.median(found), max(found)))]
        for mode, found in ((mode, gains(cells, mode, "bf16")) for mode in modes)
        if found
    ]
    rows = [
        [str(cell["m"]), str(cell["k"]), str(cell["n"]), f"{statistics.median(cell['rounds']['bf16']):.3f}"]
        + [number(paired(cell, mode, "bf16") if mode in cell["rounds"] else None, "{:.3f}x") for mode in modes]
        for cell in sorted(cells, key=lambda cell: (cell["m"], cell["k"], cell["n"]))
    ]
    return [
        "## One layer: norm, linear, sigmoid",
        "Forward and backward over tokens M, inputs K and outputs N, every mode compiled; a speed is the median of "
        f"rounds in which the modes took turns. {words}",
        grid("| speed of BF16 | least | median | most |", ranges),
        "![Gain over BF16 by K and N, a panel for each M](performance/layer.svg)",
        details("Every cell", grid("| M | K | N | BF16 ms | " + " | ".join(modes) + " |", rows)),
    ]


# --- A GPT on text ---------------------------------------------------------------------------------------------


def parity(result: Result) -> list[str]:
    final = {(run["mode"], run["seed"]): run["final"] for run in result["runs"]}
    modes, seeds = list(dict.fromkeys(mode for mode, _ in final)), sorted({seed for _, seed in final})
    rows = [[str(seed), *(loss(final, mode, seed) for mode in modes)] for seed in seeds]
    settings = result["settings"]
    words = (
        f"{settings['layers']} layers of width {settings['width']}, context {settings['context']}, "
        f"{result['tokens'] / 1e6:.0f} million tokens in {settings['steps']} steps ({result['epochs']:.2f} epochs). "
        "For each seed every mode starts from the same weights and sees the same batches. Final losses, and the gap to "
        "BF16:"
    )
    deviation = number(result["bf16_deviation"], "{:.3%}")
    return [
        "## A GPT on text: loss against BF16",
        words,
        grid("| seed | " + " | ".join(modes) + " |", rows),
        grid("| mode | seeds | mean gap | 95 % interval |", gap_rows(result["gaps"])),
        f"The BF16 runs lie {result['bf16_spread']:.3%} apart (largest less smallest, over their mean); their standard "
        f"deviation is {deviation}.",
        "![Training loss, and its gap to BF16](performance/parity.svg)",
        *step_times(result["step_times"]),
    ]


def loss(final: dict[tuple[str, int], float], mode: str, seed: int) -> str:
    """A run's final loss, with its gap to BF16's of the same seed."""
    gap = ratio(final.get((mode, seed)), final.get(("bf16", seed)))
    words = number(final.get((mode, seed)), "{:.4f}")
    return words if gap is None or mode == "bf16" else f"{words} ({gap - 1:+.2%})"


def gap_rows(gaps: dict[str, Any]) -> Iterable[list[str]]:
    for mode, gap in gaps.items():
        interval = " to ".join(f"{end:+.3%}" for end in gap["interval"]) if gap["interval"] else "– (one seed)"
        yield [mode, str(len(gap["seeds"])), f"{gap['mean']:+.3%}", interval]


def step_times(result: Result | None) -> list[str]:
    if result is None:
        return ["The step times have not been measured: `bench/gpu/gpt_parity.py --time-steps`."]
    base = next(row["milliseconds"] for row in result["steps"] if row["mode"] == result["base"])
    batch = result["settings"]["batch"] * result["settings"]["context"]
    rows = [
        [
            row["mode"],
            str(row["converted"]),
            f"{row['milliseconds']:.1f}",
            " to ".join(f"{ms:.1f}" for ms in row["quartiles"]),
            f"{base / row['milliseconds']:.3f}x",
            number(row["gradient_error"], "{:.3f}"),
        ]
        for row in result["steps"]
    ]
    return [
        f"A whole optimizer step of {batch} tokens, the modes taking turns in one process; the gradient error is the "
        "relative one of the weight gradient that is furthest from BF16's.",
        grid(f"| mode | layers in FP8 | ms a step | quartiles | of {result['base']} | gradient error |", rows),
        f"Step times: {machine(result)}",
    ]
