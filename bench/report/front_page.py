"""The gains that README shows: speeds over compiled BF16 and over torchao, with the accuracy beside them."""

import re
from typing import NamedTuple

from bench.gpu.modes import BASE, FP8_CACHE, FUSED, SERVE, SERVE_TORCHAO
from bench.gpu.sharded import OURS, TORCHAO
from bench.report import generation
from bench.report.performance import by_mode, serve_medians
from bench.report.scaling import rows_of
from bench.report.tables import Result, Row, number, ratio
from octavo.speed.programs import OCTAVO

FSDP = "gpu_fsdp_16_layers_2_gpus"
SPEEDUP = "tokens_per_second_speedup"


class Gain(NamedTuple):
    """A row: speeds as multiples of compiled BF16's and of torchao's (None: not measured)."""

    what: str
    to_bf16: float | None
    to_torchao: float | None
    accuracy: str
    link: str

    def row(self) -> Row:
        return {
            "": self.what,
            "speed over compiled BF16": number(self.to_bf16, "{:.2f}x"),
            "over torchao": number(self.to_torchao, "{:.2f}x"),
            "accuracy against BF16": self.accuracy,
            "measured": f"[how](docs/{self.link})",
        }


def gains(results: dict[str, Result]) -> list[Gain]:
    stack, parity, serve = results["gpu_stack"], results["gpt_parity"], results["gpu_serve"]
    ms, sqnr = by_mode(stack["modes"], "median"), stack["sqnr"]
    best = min((name for name in ms if name.startswith("torchao")), key=ms.__getitem__)
    steps = {row["mode"]: row["milliseconds"] for row in (parity["step_times"] or {"steps": []})["steps"]}
    loss = {mode: gap["mean"] for mode, gap in parity["gaps"].items()}
    prefill, llama = serve_medians(results, "prefill"), "Llama-3-8B's shape"
    logits = serve["prefill"]["sqnr"]
    speed = ratio(steps.get("bf16"), steps.get("rowwise"))
    small = ": small layers do not gain" if speed is not None and speed < 1 else ""
    return [
        Gain(
            f"Train four layers of Llama-3-8B's shape, {gpu(stack)}",
            ms[BASE] / ms[FUSED],
            ms[best] / ms[FUSED],
            f"SQNR of the input's gradient {sqnr[FUSED][1]:.1f} dB; torchao's {sqnr[best][1]:.1f} dB",
            "performance.md#the-layer-stack",
        ),
        *sharded(results),
        Gain(
            # measured before our GPT-2 had three layers for q, k and v
            f"Train a GPT of width {parity['settings']['width']}, q, k and v as one layer, {gpu(parity)}{small}",
            speed,
            ratio(steps.get("torchao"), steps.get("rowwise")),
            f"final loss {loss['rowwise']:+.2%}; torchao's {number(loss.get('torchao'), '{:+.2%}')}; "
            f"seeds of BF16 differ by {parity['bf16_spread']:.2%}",
            "performance.md#a-gpt-on-text-loss-against-bf16",
        ),
        Gain(
            f"Read a prompt of {serve['prefill']['tokens']:,} tokens, {llama}, {gpu(serve)}",
            prefill[BASE] / prefill[SERVE],
            prefill[SERVE_TORCHAO] / prefill[SERVE],
            f"SQNR of the logits {logits[SERVE]:.1f} dB; torchao's {logits[SERVE_TORCHAO]:.1f} dB",
            "performance.md#serving",
        ),
        *generated(results, llama),
    ]


def sharded(results: dict[str, Result]) -> list[Gain]:
    """The row of FSDP2, once it is measured."""
    if FSDP not in results:
        return []
    speeds = by_mode(list(rows_of(results[FSDP]).values()), "ratio")
    gpus = f"two {gpu(results[FSDP])}s"
    what = f"Train 16 layers, embedding and head with FSDP2 on {gpus}, weights gathered in FP8"
    to_torchao = ratio(speeds[OURS], speeds.get(TORCHAO))
    return [Gain(what, speeds[OURS], to_torchao, "weights have the bytes and scales of one GPU", "scaling.md")]


def generated(results: dict[str, Result], llama: str) -> list[Gain]:
    """The rows of `generate`, once it is measured; BF16 is the faster of its two ways."""
    if generation.NAME not in results:
        return []
    packed = results["packing_quality"]["schemes"]["channel"]["perplexity_ratio"]["value"]
    cached = results["kv_cache_quality"]["caches"]["fp8, calibrated"]["perplexity_ratio"]["value"]
    where = f"{llama}, `generate`, {gpu(results[generation.NAME])}"
    accuracy = f"perplexity of a small Llama {packed:+.2%}"
    one = generation.figure(results, "decode 1", OCTAVO, SPEEDUP)
    many = generation.figure(results, "decode 64", FP8_CACHE, SPEEDUP)
    link = "performance.md#generating-text"
    return [
        Gain(f"Generate one text, {where}", one, None, accuracy, link),
        Gain(
            f"Generate 64 texts with an FP8 KV cache, {where}",
            many,
            None,
            f"{accuracy}, and {cached:+.2%} for the cache",
            link,
        ),
    ]


def gpu(result: Result) -> str:
    """The GPU's short name, H100 of "NVIDIA H100 80GB HBM3", or its name where that has none."""
    name = str(result["machine"]["gpu"])
    short = re.search(r"\b[A-Z]\d00\b", name)
    return short[0] if short else name
