"""The time of an emulated FP8 training step against BF16's and FP32's, on this CPU, at the size of the demo.

First an emulated GEMM is compared with float64 on the same operands. Then the modes take turns: forward, backward,
clipping and AdamW. The ratios are of medians.
"""

import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from bench import record
from octavo import ops
from octavo.recipe import PRESETS, ROW_W, ROW_X
from octavo.train.config import Config
from octavo.train.start import start_run
from octavo.train.trainer import Trainer

ROUNDS = 15
MODES = [("bf16", "bf16"), ("bf16", "fp32"), *((name, "bf16") for name in PRESETS if name != "bf16")]


def main() -> None:
    check()
    with TemporaryDirectory() as folder:
        trainers = {mode: make_trainer(*mode, Path(folder)) for mode in MODES}
        seconds = measure(trainers)
    base = {precision: statistics.median(seconds["bf16", precision]) for precision in ("bf16", "fp32")}
    rows = []
    for recipe, precision in MODES:
        median = statistics.median(seconds[recipe, precision])
        row = {"recipe": recipe, "precision": precision, "milliseconds": 1e3 * median}
        rows.append(row | {"to_bf16": median / base["bf16"], "to_fp32": median / base["fp32"]})
        ratios = f"{rows[-1]['to_bf16']:.2f} x BF16  {rows[-1]['to_fp32']:.2f} x FP32"
        print(f"{recipe:16} {precision}  {1e3 * median:7.1f} ms  {ratios}")
    print(record.write("cpu_step", {"rounds": ROUNDS, "config": Config().to_dict(), "steps": rows}))


def check() -> None:
    """Compare an emulated GEMM with float64 on the same eight-bit operands."""
    x, w = torch.randn(64, 256), torch.randn(704, 256)
    a, b = ops.quantize(x, ROW_X), ops.quantize(w, ROW_W)
    exact = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    error = (ops.scaled_mm(a, b, out_dtype=torch.float32).double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 1e-6, f"the emulated GEMM is off by {error.max():.1e}"


def make_trainer(recipe: str, precision: str, folder: Path) -> Trainer:
    """A run with the demo's model and batch."""
    config = Config(recipe=recipe, precision=precision, device="cpu", out=str(folder / f"{recipe}-{precision}"))
    return start_run(config, Console(quiet=True))


def measure(trainers: dict[tuple[str, str], Trainer]) -> dict[tuple[str, str], list[float]]:
    """Seconds of each step. Every mode runs once a round; two rounds warm up."""
    seconds: dict[tuple[str, str], list[float]] = {mode: [] for mode in trainers}
    for index in range(ROUNDS + 2):
        for mode, trainer in trainers.items():
            began = time.perf_counter()
            trainer.step()
            if index >= 2:
                seconds[mode].append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    main()
