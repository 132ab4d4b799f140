"""The five gains that README shows: speeds over compiled BF16 and over torchao, with the accuracy beside them."""

import re
from typing import NamedTuple

from bench.gpu.modes import BASE, FUSED, SERVE, SERVE_FP8_CACHE, SERVE_TORCHAO
from bench.report.performance import by_mode, serve_medians
from bench.report.tables import Result, Row, number, ratio


class Gain(NamedTuple):
    """A row: speeds as multiples of compiled BF16's and of torchao's (None: not measured)."""

    what: str
    to_bf16: float | None
    to_torchao: float | None
    accuracy: str
    link: str

    def row(self) -> Row:
        return {
            "on one GPU": self.what,
            "speed over compiled BF16": number(self.to_bf16, "{:.2f}x"),
            "over torchao": number(self.to_torchao, "{:.2f}x"),
            "accuracy against BF16": self.accuracy,
            "measured": f"[how](docs/performance.md#{self.link})",
        }


def gains(results: dict[str, Result]) -> list[Gain]:
    stack, parity, serve = results["gpu_stack"], results["gpt_parity"], results["gpu_serve"]
    packed = results["packing_quality"]["schemes"]["channel"]["perplexity_ratio"]["value"]
    cached = results["kv_cache_quality"]["caches"]["fp8, calibrated"]["perplexity_ratio"]["value"]
    ms, sqnr = by_mode(stack["modes"], "median"), stack["sqnr"]
    best = min((name for name in ms if name.startswith("torchao")), key=ms.__getitem__)
    steps = {row["mode"]: row["milliseconds"] for row in (parity["step_times"] or {"steps": []})["steps"]}
    loss = {mode: gap["mean"] for mode, gap in parity["gaps"].items()}
    prefill, decode, many = (serve_medians(results, part) for part in ("prefill", "decode 1", "decode 64"))
    llama = f"Llama-3-8B's shape, {gpu(serve)}"
    logits = serve["prefill"]["sqnr"]
    speed = ratio(steps.get("bf16"), steps.get("rowwise"))
    small = ": small layers do not gain" if speed is not None and speed < 1 else ""
    return [
        Gain(
            f"Train four layers of Llama-3-8B's shape, {gpu(stack)}",
            ms[BASE] / ms[FUSED],
            ms[best] / ms[FUSED],
            f"SQNR of the input's gradient {sqnr[FUSED][1]:.1f} dB; torchao's {sqnr[best][1]:.1f} dB",
            "the-layer-stack",
        ),
        Gain(
            # measured before our GPT-2 had three layers for q, k and v
            f"Train a GPT of width {parity['settings']['width']}, q, k and v as one layer, {gpu(parity)}{small}",
            speed,
            ratio(steps.get("torchao"), steps.get("rowwise")),
            f"final loss {loss['rowwise']:+.2%}; torchao's {number(loss.get('torchao'), '{:+.2%}')}; "
            f"seeds of BF16 differ by {parity['bf16_spread']:.2%}",
            "a-gpt-on-text-loss-against-bf16",
        ),
        Gain(
            f"Read a prompt of {serve['prefill']['tokens']:,} tokens, {llama}",
            prefill[BASE] / prefill[SERVE],
            prefill[SERVE_TORCHAO] / prefill[SERVE],
            f"SQNR of the logits {logits[SERVE]:.1f} dB; torchao's {logits[SERVE_TORCHAO]:.1f} dB",
            "serving",
        ),
        Gain(
            f"Generate one text, {llama}",
            decode[BASE] / decode[SERVE],
            None,
            f"perplexity of a small Llama {packed:+.2%}",
            "serving",
        ),
        Gain(
            f"Generate 64 texts with an FP8 KV cache, {llama}",
            many[BASE] / many[SERVE_FP8_CACHE],
            None,
            f"perplexity of a small Llama {packed:+.2%}, and {cached:+.2%} for the cache",
            "serving",
        ),
    ]


def gpu(result: Result) -> str:
    """The GPU's short name: H100 of "NVIDIA H100 80GB HBM3"."""
    return str(re.findall(r"\b[A-Z]\d00\b", result["machine"]["gpu"])[0])
