"""The speeds and sizes that the project aims at. Each aim is met, missed or not measured."""

import operator
from collections.abc import Iterator
from typing import NamedTuple

from bench.gpu.modes import (
    BASE,
    CACHE_FP8,
    FP8_CACHE,
    FUSED,
    FUSED_EAGER,
    PLAIN,
    SERVE,
    SERVE_FP8_CACHE,
    SERVE_GRAPH,
    SERVE_TORCHAO,
    WEIGHT_ONLY,
    speedup,
)
from bench.report.generation import eager_speed, figure, graph_share, start_time
from bench.report.performance import COPY_SHARE, ONLY_IF_FASTER, best_torchao, by_mode, layer_speedups, serve_medians
from bench.report.tables import MISSING, Result, Row, ratio
from octavo.speed.programs import OCTAVO

SIGNS = {"≥": operator.ge, "≤": operator.le, "<": operator.lt}
COPY_ELEMENTS = 8192 * 4096  # a kernel on fewer elements has no aim
PARITY_GAP = 0.0025
DECODES = {"decode 1": 1.75, "decode 64": 1.5}
STEP = "stack, fused rowwise, compile"


class Aim(NamedTuple):
    """A figure and its bound; None stands for a figure that was not measured."""

    claim: str
    value: float | None
    sign: str
    bound: float
    form: str = "{:.3f}x"

    def row(self) -> Row:
        measured = MISSING if self.value is None else self.form.format(self.value)
        required = f"{self.sign} {self.form.format(self.bound)}"
        return {"aim": self.claim, "required": required, "measured": measured, "verdict": self.verdict}

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "met" if SIGNS[self.sign](self.value, self.bound) else "**missed**"


def experts(results: dict[str, Result]) -> Iterator[Aim]:
    """A layer of experts of Mixtral's shape with its routing."""
    cell = results["gpu_moe"]["mixtral"]
    for other, bound in (("bf16", 1.4), ("torchao", 1.15)):
        value = speedup(cell, "ours", other) if other in cell["rounds"] else None
        yield Aim(f"experts, Mixtral's shape: speed vs {other}", value, "≥", bound)


def aims(results: dict[str, Result]) -> list[Aim]:
    parts = (generation, stack, kernels, layer, experts, parity, serving, weight_only, cache)
    return [aim for part in parts for aim in part(results)]


def generation(results: dict[str, Result]) -> Iterator[Aim]:
    """Through `model.generate`, against the faster of BF16's two ways."""
    for batch, way, bound in ((1, OCTAVO, 1.7), (16, OCTAVO, 1.5), (64, OCTAVO, 1.4), (64, FP8_CACHE, 1.5)):
        claim = f"generate, batch {batch}, {way}: tokens/s vs the best BF16"
        yield Aim(claim, figure(results, f"decode {batch}", way, "tokens_per_second_speedup"), "≥", bound)
    claim = "generate, batch 1: share of the tokens/s of a CUDA graph captured by hand"
    yield Aim(claim, graph_share(results, 1, OCTAVO), "≥", 0.9, "{:.2f}")
    for batch in (1, 16, 64):
        claim = f"generate without CUDA graphs, batch {batch}: tokens/s vs BF16, eager"
        yield Aim(claim, eager_speed(results, batch), "≥", 1.0)
    found = figure(results, "prompt", OCTAVO, "first_token_speedup", 2048)
    yield Aim("generate, first token of 2,048: speed vs BF16", found, "≥", 1.45)
    yield Aim("octavo.load and the first token: time vs BF16", start_time(results), "≤", 2.0)


def stack(results: dict[str, Result]) -> Iterator[Aim]:
    found = results["gpu_stack"]
    ms, peak = by_mode(found["modes"], "median"), by_mode(found["modes"], "peak_gb")
    head, base = ms.get(FUSED), ms.get(BASE)
    yield Aim(f"{STEP}: speed vs BF16", ratio(base, head), "≥", 1.50)
    yield Aim(f"{STEP}: speed vs the best torchao mode", ratio(best_torchao(ms), head), "≥", 1.25)
    yield Aim("stack, plain rowwise, compile: speed vs BF16", ratio(base, ms.get(PLAIN)), "≥", 1.40)
    yield Aim("stack, fused rowwise, eager: speed vs BF16", ratio(base, ms.get(FUSED_EAGER)), "≥", 1.15)
    yield Aim(f"{STEP}: time vs the floor", ratio(head, found["floors"]["cast"]["total"]), "≤", 1.12)
    rest = found["profiles"][FUSED]["rest"]
    yield Aim(f"{STEP}: time that is neither GEMM nor attention", rest, "≤", 8.0, "{:.2f} ms")
    yield Aim(f"{STEP}: peak memory vs BF16", ratio(peak.get(FUSED), peak.get(BASE)), "≤", 0.85)
    yield Aim(f"{STEP}: peak memory vs the leanest torchao mode", ratio(peak.get(FUSED), best_torchao(peak)), "<", 1.0)


def kernels(results: dict[str, Result]) -> Iterator[Aim]:
    rows = results["gpu_kernels"]["kernels"]
    shares = [row["share"] for row in rows if row["shape"][0] * row["shape"][1] >= COPY_ELEMENTS]
    claim = "kernels at 8192 x 4096 and above: least share of a copy's bandwidth"
    yield Aim(claim, min(shares, default=None), "≥", COPY_SHARE, "{:.2f}")


def layer(results: dict[str, Result]) -> Iterator[Aim]:
    for claim, mode, other, bound in (
        ("ours: least speed vs torchao", "ours", "torchao", 1.0),
        ("only if faster: least speed vs BF16", "ours, only if faster", "bf16", ONLY_IF_FASTER),
    ):
        found = layer_speedups(results["gpu_layer"]["cells"], mode, other)
        yield Aim(f"one layer, {claim}", min(found, default=None), "≥", bound)


def parity(results: dict[str, Result]) -> Iterator[Aim]:
    """The gap of a mode of ours is allowed to be as large as the spread of BF16's seeds."""
    found = results["gpt_parity"]
    for mode, gap in found["gaps"].items():
        if mode != "torchao":
            claim = f"a GPT on text, {mode}: mean gap of the final loss to BF16, without its sign"
            yield Aim(claim, abs(gap["mean"]), "≤", max(PARITY_GAP, found["bf16_spread"]), "{:.3%}")
    times = {row["mode"]: row["ratio"] for row in (found["step_times"] or {"steps": []})["steps"]}
    yield Aim("the same GPT, only if faster: time of a step vs BF16", times.get("rowwise_if_faster"), "≤", 1.0)


def weight_only(results: dict[str, Result]) -> Iterator[Aim]:
    """A decoding step of one text by the scheme `weight`."""
    rounds = results.get("gpu_weight_only", {"decode": {"rounds": {}}})["decode"]
    value = speedup(rounds, WEIGHT_ONLY, BASE) if rounds["rounds"] else None
    yield Aim("decode of 1 with FP8 weights alone: speed vs BF16", value, "≥", 1.6)


def serving(results: dict[str, Result]) -> Iterator[Aim]:
    found = results["gpu_serve"]
    prefill = serve_medians(results, "prefill")
    ours = min((prefill[mode] for mode in (SERVE, SERVE_GRAPH) if mode in prefill), default=None)
    yield Aim("serving, prefill: speed vs BF16", ratio(prefill.get(BASE), ours), "≥", 1.60)
    yield Aim("serving, prefill: speed vs torchao's row-wise FP8", ratio(prefill.get(SERVE_TORCHAO), ours), "≥", 1.10)
    for part, bound in DECODES.items():
        ms = serve_medians(results, part)
        for words, mode in (("", SERVE), (", FP8 KV cache", SERVE_FP8_CACHE)):
            claim = f"serving, {part.replace(' ', ' of ')}{words}: speed vs BF16"
            yield Aim(claim, ratio(ms.get(BASE), ms.get(mode)), "≥", bound)
    for part, bound in (("linears", 0.52), ("model", 0.58)):
        share = ratio(found["memory"]["ours"][part], found["memory"]["bf16"][part])
        yield Aim(f"serving, bytes of the weights: {part}, vs BF16", share, "≤", bound, "{:.3f}")
    shares = [row["share"] for row in found["kernels"] if row["m"] == 1]
    claim = "serving, the GEMM of one row: least share of a copy's bandwidth"
    yield Aim(claim, min(shares, default=None), "≥", COPY_SHARE, "{:.3f}")


def cache(results: dict[str, Result]) -> Iterator[Aim]:
    """Whole steps, against the faster of the two ways to read a BF16 cache."""
    ms = by_mode(results["gpu_kv_cache"]["decode"]["modes"], "median")
    base = min((time for mode, time in ms.items() if mode.startswith("bf16")), default=None)
    claim = "decode of 8 at 32,768 tokens, cache in FP8: speed vs a BF16 cache"
    yield Aim(claim, ratio(base, ms.get(CACHE_FP8)), "≥", 1.40)
