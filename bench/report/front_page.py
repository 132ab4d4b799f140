"""The gains that README shows: speeds over compiled BF16 and over torchao, with the accuracy beside them."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from bench.gpu.modes import BASE, FP8_CACHE, FUSED, SERVE, SERVE_TORCHAO
from bench.gpu.sharded import OURS, TORCHAO
from bench.report import generation
from bench.report.performance import by_mode, serve_medians
from bench.report.scaling import rows_of, runs
from bench.report.tables import Result, Row, number, ratio
from octavo.speed.programs import OCTAVO

TENSOR_PARALLEL = "gpu_tensor_parallel_2_gpus"
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
        *other_models(results),
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


def sharded(results: dict[str, Result]) -> Iterator[Gain]:
    """The rows of FSDP2 and tensor parallelism on two GPUs, once they are measured."""
    accuracy, link = "weights have the bytes and scales of one GPU", "scaling.md"
    on_two = [run for run in runs(results) if run["setting"]["world"] == 2]
    for run in on_two[-1:]:
        speeds, others = speeds_of(run), [(each["setting"]["layers"], speeds_of(each)[OURS]) for each in on_two[:-1]]
        fewer = "".join(f"; {layers} layers {speed:.2f}x" for layers, speed in others)
        layers = f"{run['setting']['layers']} layers"
        what = f"Train Llama-3-8B, {layers}, with FSDP2 on two {gpu(run)}s, weights gathered in FP8{fewer}"
        yield Gain(what, speeds[OURS], ratio(speeds[OURS], speeds.get(TORCHAO)), accuracy, link)
    if TENSOR_PARALLEL in results:
        result = results[TENSOR_PARALLEL]
        speeds = speeds_of(result)
        ours, torchao = (
            max((v for k, v in speeds.items() if k.startswith(name)), default=None) for name in ("octavo", "torchao")
        )
        what = f"Train blocks of Llama-3-70B's shape, tensor parallel on two {gpu(result)}s"
        yield Gain(what, ours, ratio(ours, torchao), accuracy, f"{link}#tensor-parallelism")


def other_models(results: dict[str, Result]) -> Iterator[Gain]:
    """The rows of experts and of vision transformers, once they are measured."""
    if "gpu_moe" in results:
        layer = results["gpu_moe"]["mixtral"]
        worst = min(layer["one_layer_db"].values())
        what = f"Train a layer of {layer['shape']['experts']} experts of Mixtral's shape, {gpu(results['gpu_moe'])}"
        accuracy = f"SQNR of y, dx and dw {worst:.1f} dB"
        yield Gain(what, *to_others(layer), accuracy, "performance.md#experts")
    if "gpu_vision" in results:
        blocks = results["gpu_vision"]["shapes"]["ViT-H/14"]
        what = f"Train {blocks['shape']['layers']} blocks of ViT-H/14, {gpu(results['gpu_vision'])}"
        y, dx, dw = blocks["db"]["ours"]
        accuracy = f"SQNR of y {y:.1f} dB, dx {dx:.1f} dB, dw {dw:.1f} dB"
        yield Gain(what, *to_others(blocks), accuracy, "vision.md")


def to_others(found: Result) -> tuple[float, float | None]:
    """Ours over BF16, and over the fastest mode of torchao."""
    speeds = found["speedup"]
    torchao = [speed for mode, speed in speeds.items() if mode.startswith("torchao")]
    return speeds["ours"], ratio(speeds["ours"], max(torchao, default=None))


def speeds_of(result: Result) -> dict[str, float]:
    """Mode to its speed as a multiple of that of BF16."""
    return by_mode(list(rows_of(result).values()), "ratio")


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
