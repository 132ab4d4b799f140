"""README's table and picture: five gains over compiled BF16 and over torchao, from the result files."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from bench.report import aims
from bench.report.aims import BASE, HEAD, SERVE_CACHE, SERVE_OURS, SERVE_TORCHAO, Result
from bench.report.plots import BLUE, ORANGE, STYLE, save
from bench.report.tables import ROOT, grid, number

README = ROOT.parent / "README.md"
PICTURE = ROOT.parent / "docs" / "performance" / "gains.svg"
SOURCES = ("gpu_stack", "gpt_parity", "gpu_serve", "packing_quality", "kv_cache_quality")
PARTS = ("prefill", "decode 1", "decode 64")  # of gpu_serve
BEGIN, END = "<!-- gains: `make docs` writes this part from bench/results -->\n", "<!-- end of gains -->"


class Gain(NamedTuple):
    """A row: speeds as multiples of compiled BF16's and of torchao's (None: not measured)."""

    what: str
    to_bf16: float
    to_torchao: float | None
    accuracy: str
    link: str


def gains(found: dict[str, Result]) -> list[Gain]:
    """The rows, by the results of SOURCES."""
    stack, parity, serve = found["gpu_stack"], found["gpt_parity"], found["gpu_serve"]
    packed = found["packing_quality"]["schemes"]["channel"]["perplexity_ratio"]["value"]
    cached = found["kv_cache_quality"]["caches"]["fp8, calibrated"]["perplexity_ratio"]["value"]
    ms, sqnr = aims.medians(stack), stack["sqnr"]
    best = min((name for name in ms if name.startswith("torchao")), key=ms.__getitem__)
    steps = {row["mode"]: row["milliseconds"] for row in parity["step_times"]["steps"]}
    loss = {mode: gap["mean"] for mode, gap in parity["gaps"].items()}
    serving = {part: {mode: row["median"] for mode, row in serve[part]["ms"].items()} for part in PARTS}
    prefill, decode, decode_many = serving.values()
    llama = f"Llama-3-8B's shape, {gpu(serve)}"
    logits = serve["prefill"]["sqnr"]
    return [
        Gain(
            f"Train four layers of Llama-3-8B's shape, {gpu(stack)}",
            ms[BASE] / ms[HEAD],
            ms[best] / ms[HEAD],
            f"SQNR of the input's gradient {sqnr[HEAD][1]:.1f} dB; torchao's {sqnr[best][1]:.1f} dB",
            "docs/performance.md#the-layer-stack",
        ),
        Gain(
            f"Train a GPT of width {parity['settings']['width']}, {gpu(parity)}: small layers do not gain",
            steps["bf16"] / steps["rowwise"],
            steps["torchao"] / steps["rowwise"],
            f"final loss {loss['rowwise']:+.2%}; torchao's {loss['torchao']:+.2%}; "
            f"seeds of BF16 differ by {parity['bf16_spread']:.2%}",
            "docs/performance.md#a-gpt-on-text-loss-against-bf16",
        ),
        Gain(
            f"Read a prompt of {serve['prefill']['tokens']:,} tokens, {llama}",
            prefill[BASE] / prefill[SERVE_OURS],
            prefill[SERVE_TORCHAO] / prefill[SERVE_OURS],
            f"SQNR of the logits {logits[SERVE_OURS]:.1f} dB; torchao's {logits[SERVE_TORCHAO]:.1f} dB",
            "docs/performance.md#serving",
        ),
        Gain(
            f"Generate one text, {llama}",
            decode[BASE] / decode[SERVE_OURS],
            None,
            f"perplexity of a small Llama {packed:+.2%}",
            "docs/performance.md#serving",
        ),
        Gain(
            f"Generate 64 texts with an FP8 KV cache, {llama}",
            decode_many[BASE] / decode_many[SERVE_CACHE],
            None,
            f"perplexity of a small Llama {packed:+.2%}, and {cached:+.2%} for the cache",
            "docs/performance.md#serving",
        ),
    ]


def gpu(result: Result) -> str:
    """The GPU's short name: H100 of "NVIDIA H100 80GB HBM3"."""
    return str(re.findall(r"\b[A-Z]\d00\b", result["machine"]["gpu"])[0])


def table(rows: list[Gain]) -> str:
    head = "| on one GPU | speed over compiled BF16 | over torchao | accuracy against BF16 | measured |"
    cells = [
        [row.what, f"{row.to_bf16:.2f}x", number(row.to_torchao, "{:.2f}x"), row.accuracy, f"[how]({row.link})"]
        for row in rows
    ]
    return grid(head, cells)


def section() -> str:
    """What stands between README's two marks."""
    picture = f"![Speed over compiled BF16]({PICTURE.relative_to(README.parent)})"
    return f"{BEGIN}{picture}\n\n{table(gains(load()))}\n{END}"


def load() -> dict[str, Result]:
    return {name: json.loads((ROOT / "results" / f"{name}.json").read_text()) for name in SOURCES}


def main() -> None:
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(before + section() + rest.partition(END)[2])
    with matplotlib.rc_context(STYLE):
        save(plot(gains(load())), PICTURE)


def plot(rows: list[Gain]) -> Any:
    """Speeds over compiled BF16: Octavo's, and torchao's where it was measured."""
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(reversed(rows)):
        bars = [(0.2, row.to_bf16, BLUE, "white", "Octavo")]
        if row.to_torchao:
            bars.append((-0.2, row.to_bf16 / row.to_torchao, ORANGE, "black", "torchao"))
        for shift, speed, color, ink, label in bars:
            axes.barh(place + shift, speed, height=0.36, color=color, label=label if place == len(rows) - 1 else None)
            axes.text(speed, place + shift, f"{speed:.2f} ", va="center", ha="right", color=ink)
    axes.axvline(1, color="black", linewidth=1, label="compiled BF16")
    axes.set_yticks(range(len(rows)), [row.what.partition(", ")[0] for row in reversed(rows)])
    axes.set_xlabel("speed over compiled BF16")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


if __name__ == "__main__":
    main()
