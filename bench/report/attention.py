"""The tables of docs/attention.md: attention in FP8 beside BF16's; and the speeds that `octavo plan` reads."""

import json
from collections.abc import Iterable
from pathlib import Path

from bench.gpu.modes import BASE, speedup
from bench.report.tables import MISSING, Result, Row, machine, markdown

Rows = Iterable[Row]
PASSES = {"forward": "forward", "both": "forward and backward"}
SHIPPED = Path(__file__).parents[2] / "src" / "octavo" / "plan" / "attention_speeds.json"
PLANNED = {  # what a plan asks for: the pass and the mode that answer it
    "forward": ("forward", "ours"),
    "forward from an FP8 KV cache": ("forward", "ours, FP8 KV cache"),
    "forward and backward": ("both", "ours"),
}


def attention_times(results: dict[str, Result]) -> Rows:
    """Milliseconds of each mode by pass and tokens, and its speed against the fastest of BF16."""
    for cell in results["gpu_attention"]["cells"]:
        for which, words in PASSES.items():
            ms = cell[which]["ms"]
            best = fastest_bf16(ms)
            for mode, value in ms.items():
                yield {
                    "tokens": f"{cell['tokens']:,}",
                    "pass": words,
                    "mode": mode,
                    "ms": f"{value:.3f}",
                    "vs the best BF16": f"{speedup(cell[which], mode, best):.3f}x",
                }


def fastest_bf16(ms: dict[str, float]) -> str:
    return min((mode for mode in ms if mode.startswith("BF16")), key=ms.__getitem__)


def attention_errors(results: dict[str, Result]) -> Rows:
    for cell in results["gpu_attention"]["cells"]:
        for mode, found in cell["db"].items():
            db = {name: f"{value:.1f}" for name, value in found.items()}
            yield {"tokens": f"{cell['tokens']:,}", "mode": mode, **db}


def attention_prefill(results: dict[str, Result]) -> Rows:
    found = results["gpu_attention"]["prefill"]
    for mode in found["ms"]:
        db = found["db"].get(mode)
        yield {
            "mode": mode,
            "ms": f"{found['ms'][mode]:.1f}",
            "vs BF16": f"{speedup(found, mode, BASE):.3f}x",
            "SQNR of the logits": MISSING if db is None else f"{db:.1f} dB",
        }


def attention_losses(results: dict[str, Result]) -> str:
    """The part of the page on the loss, if it was measured."""
    if "gpu_attention_loss" not in results:
        return "Not measured."
    found = results["gpu_attention_loss"]
    size = "{layers} layers of width {width}, {heads} heads, sequences of {context:,}".format(**found["settings"])
    runs = f"Each run has {found['tokens'] / 1e6:.0f} million tokens: {size}."
    return f"{markdown(loss_rows(found))}\n\n{runs} {machine(found)}"


def loss_rows(found: Result) -> Rows:
    for mode, losses in found["losses"].items():
        gap = found["gaps"].get(mode)
        low, high = (gap or {}).get("interval") or (None, None)
        yield {
            "linear layers and attention": mode,
            "losses by seed": ", ".join(f"{loss:.4f}" for loss in losses.values()),
            "gap to BF16, mean": MISSING if gap is None else f"{gap['mean']:+.2%}",
            "95 % interval": MISSING if low is None else f"{low:+.2%} to {high:+.2%}",
        }


def shipped(results: dict[str, Result]) -> str:
    """The file that octavo.plan.attention reads: the speed of FP8 over the fastest of BF16, by tokens."""
    result = results["gpu_attention"]
    speeds = {
        name: {
            str(cell["tokens"]): round(speedup(cell[which], mode, fastest_bf16(cell[which]["ms"])), 3)
            for cell in result["cells"]
        }
        for name, (which, mode) in PLANNED.items()
    }
    facts = {key: result["machine"][key] for key in ("gpu", "torch", "measured")}
    return json.dumps({"machine": facts, "speeds": speeds}, indent=2) + "\n"


def ship(results: dict[str, Result]) -> None:
    """Write the speeds into the package, once they are measured."""
    if "gpu_attention" in results:
        SHIPPED.write_text(shipped(results))
