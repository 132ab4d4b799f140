"""The time of an emulated FP8 training step against BF16's and FP32's, on this CPU, at the size of the demo.

First an emulated GEMM is compared with float64 on the same operands. Then the modes take turns: forward, backward,
clipping and AdamW. The ratios are of medians.
"""

from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from bench import record
from bench.gpu.harness import interleaved, medians, show
from octavo import ops
from octavo.recipe import PRESETS, ROW_W, ROW_X
from octavo.train.config import Config
from octavo.train.trainer import start_run

ROUNDS = 15
MODES = [("bf16", "bf16"), ("bf16", "fp32"), *((name, "bf16") for name in PRESETS if name != "bf16")]


def main() -> None:
    check()
    steps = {}
    with TemporaryDirectory() as folder:
        for recipe, precision in MODES:  # with the demo's model and batch
            config = Config(recipe=recipe, precision=precision, device="cpu", out=f"{folder}/{recipe}-{precision}")
            steps[f"{recipe}-{precision}"] = start_run(config, Console(quiet=True)).step
        times = medians(interleaved(steps, rounds=ROUNDS, repeat=1))
    rows = []
    for recipe, precision in MODES:
        ms = times[f"{recipe}-{precision}"]
        row = {"recipe": recipe, "precision": precision, "milliseconds": ms}
        rows.append(row | {"to_bf16": ms / times["bf16-bf16"], "to_fp32": ms / times["bf16-fp32"]})
        show(rows[-1])
    print(record.write("cpu_step", {"rounds": ROUNDS, "config": Config().to_dict(), "steps": rows}))


def check() -> None:
    """Compare an emulated GEMM with float64 on the same eight-bit operands."""
    x, w = torch.randn(64, 256), torch.randn(704, 256)
    a, b = ops.quantize(x, ROW_X), ops.quantize(w, ROW_W)
    exact = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    error = (ops.scaled_mm(a, b, out_dtype=torch.float32).double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 1e-6, f"the emulated GEMM is off by {error.max():.1e}"


if __name__ == "__main__":
    main()
