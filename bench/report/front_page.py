"""The gains that README shows: speeds over compiled BF16 and over torchao, with the accuracy beside them.

Each is a line of gains.template.md: what it is, its two speeds, the accuracy, and the page with the measurement.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bench.gpu import modes
from bench.gpu.modes import BASE
from bench.report import performance, scaling, training
from bench.report.filler import Result, Row, fill, names_of, number
from bench.report.performance import GRAPHS, figure

LLAMA = "Llama-3-8B's shape"
NOT_DECIDED = "final loss: these runs do not decide it"
FRONT = ("a whole step", "Llama-3-8B, 32 layers", "experts", "Generate one text", "GPT of width")  # README's rows


class Gain(NamedTuple):
    """A row: speeds as multiples of compiled BF16's and of torchao's (None: not measured)."""

    what: str
    to_bf16: float
    to_torchao: float | None
    accuracy: str
    link: str

    def row(self, docs: str = "docs/") -> Row:
        """The cells; `docs` is the folder of the pages, as seen from the page with the table."""
        accuracy = {"accuracy against BF16": self.accuracy} if self.accuracy else {}
        speeds = {"speed over compiled BF16": number(self.to_bf16), "over torchao": number(self.to_torchao)}
        return {"": self.what, **speeds, **accuracy, "measured": f"[how]({docs}{self.link})"}


def front(results: dict[str, Result]) -> list[Gain]:
    """The five rows of README, the one that loses among them, without the measures of accuracy, which differ by row."""
    found = {key: gain for key in FRONT for gain in gains(results) if key in gain.what}
    return [found[key]._replace(accuracy="") for key in FRONT]


def gains(results: dict[str, Result]) -> list[Gain]:
    names = names_of(results, modes, performance, scaling, training) | globals()
    found: list[Gain] = []
    for line in Path(__file__).with_name("gains.template.md").read_text().splitlines():
        what, speeds, accuracy, link = line.split(" | ")
        to_bf16, to_torchao = eval(speeds, names)
        found.append(Gain(fill(what, names), to_bf16, to_torchao, fill(accuracy, names), link))
    return found


# --- What the lines call ---------------------------------------------------------------------------------------


def faster(speeds: Mapping[str, float], ours: str, base: str = "bf16") -> tuple[float, float | None]:
    """The speed of a mode over BF16's, and over that of torchao's fastest mode."""
    torchao = [speed for mode, speed in speeds.items() if mode.startswith("torchao")]
    return speeds[ours] / speeds[base], speeds[ours] / max(torchao) if torchao else None


def gpt_speeds(result: Result) -> dict[str, float]:
    """Of the GPT that was measured before Octavo's GPT-2 had three layers for q, k and v."""
    return {row["mode"]: 1 / row["milliseconds"] for row in result["step_times"]["steps"]}


def graphs_speed(generated: Result, batch: int, way: str) -> float:
    """The speed of the decoding steps of a way over those of BF16, both compiled and captured as a CUDA graph."""
    rates = generated[f"graphs {batch}"]["tokens_per_second"]
    return float(rates[GRAPHS[way]] / rates[BASE])


def graphs(results: dict[str, Result], batch: int, way: str) -> str:
    loop = number(figure(results, f"decode {batch}", way, "tokens_per_second_speedup"))
    where = f"{LLAMA}, CUDA graphs of both, {gpu(results['gpu_generate'])}"
    return f"{where}; `generate` is {loop} over transformers' loop in BF16"


def gpu(result: Result) -> str:
    """The GPU's short name, H100 of "NVIDIA H100 80GB HBM3"."""
    name = str(result["machine"]["gpu"])
    short = re.search(r"\b[A-Z]\d00\b", name)
    return short[0] if short else name
