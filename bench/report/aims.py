"""What the project aims at, beside what the result files say: each aim is met, missed or not measured.

The numbers here are the aims; what was measured comes from the files, and a file that is missing measures nothing.
"""

from __future__ import annotations

import operator
import statistics
from typing import Any, NamedTuple

from bench.report.tables import grid

Result = dict[str, Any]

BASE, HEAD = "bf16, compile", "ours fused: rowwise, compile"
EAGER, PLAIN = "ours fused: rowwise, eager", "ours plain: rowwise, compile"

SERVE_OURS, SERVE_TORCHAO, SERVE_GRAPH = "ours, compile", "torchao, compile", "ours, compile, CUDA graph"
SERVE_CACHE = "ours, FP8 KV cache"
STEP_BF16, STEP_FP8 = "bf16 cache, ours", "fp8 cache, ours"
DECODES = {"decode 1": 1.75, "decode 64": 1.5}  # the result's part, for so many texts -> the speed of BF16 aimed at

STEP = "stack, fused rowwise, compile"
SIGNS = {"≥": operator.ge, "≤": operator.le, "<": operator.lt}

COPY_SHARE = 0.85  # of a copy's bandwidth, by a kernel on at least this many elements:
COPY_ELEMENTS = 8192 * 4096
ONLY_IF_FASTER = 0.98  # of BF16's speed, at least, where a layer is left in BF16 unless FP8 pays
PARITY_GAP = 0.0025


class Aim(NamedTuple):
    claim: str
    required: str
    measured: str
    met: bool | None  # None: not measured


def aims(found: dict[str, Result]) -> list[Aim]:
    """All of them, by the results that were found."""
    stack = found.get("gpu_stack", {"modes": [], "profiles": {}, "floors": {}})
    kernels = found.get("gpu_kernels", {"kernels": []})["kernels"]
    cells = found.get("gpu_layer", {"cells": []})["cells"]
    parity = found.get("gpt_parity", {"gaps": {}, "bf16_spread": 0.0})
    training = [*times(stack), *memory(stack), kernel_aim(kernels), *layer_aims(cells), *parity_aims(parity)]
    return [*training, *serve_aims(found.get("gpu_serve", {})), cache_aim(found.get("gpu_kv_cache", {}))]


def table(found: dict[str, Result]) -> str:
    verdicts = {True: "met", False: "**missed**", None: "not measured"}
    rows = ([aim.claim, aim.required, aim.measured, verdicts[aim.met]] for aim in aims(found))
    return grid("| aim | required | measured | verdict |", rows)


# --- The layer stack -------------------------------------------------------------------------------------------


def times(stack: Result) -> list[Aim]:
    ms = medians(stack)
    head, base = ms.get(HEAD), ms.get(BASE)
    rest = stack["profiles"].get(HEAD, {}).get("rest")
    total = stack["floors"].get("cast", {}).get("total")
    return [
        bound(f"{STEP}: speed of BF16, compile", ratio(base, head), "≥", 1.50),
        bound(f"{STEP}: speed of the best torchao mode", ratio(best_torchao(ms), head), "≥", 1.25),
        bound("stack, plain rowwise, compile: speed of BF16, compile", ratio(base, ms.get(PLAIN)), "≥", 1.40),
        bound("stack, fused rowwise, eager: speed of BF16, compile", ratio(base, ms.get(EAGER)), "≥", 1.15),
        bound(f"{STEP}: time over the floor", ratio(head, total), "≤", 1.12),
        bound(f"{STEP}: neither GEMM nor attention", rest, "≤", 8.0, " ms"),
    ]


def memory(stack: Result) -> list[Aim]:
    peaks = peak_memory(stack)
    head, base = peaks.get(HEAD), peaks.get(BASE)
    return [
        bound(f"{STEP}: peak memory over BF16, compile", ratio(head, base), "≤", 0.85),
        bound(f"{STEP}: peak memory over the leanest torchao mode", ratio(head, best_torchao(peaks)), "<", 1.0),
    ]


def medians(stack: Result) -> dict[str, float]:
    """Milliseconds of a step by mode."""
    return {row["mode"]: row["median"] for row in stack["modes"]}


def peak_memory(stack: Result) -> dict[str, float]:
    """Peak gigabytes of a step by mode, of those whose peak was measured."""
    return {row["mode"]: row["peak_gb"] for row in stack["modes"] if row["peak_gb"] is not None}


def best_torchao(by_mode: dict[str, float]) -> float | None:
    """The least of the figures of torchao's modes."""
    return min((value for mode, value in by_mode.items() if mode.startswith("torchao")), default=None)


def ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or below is None else above / below


def bound(claim: str, value: float | None, sign: str, limit: float, unit: str = "x") -> Aim:
    """An aim on one figure: `sign` is one of SIGNS."""
    required = f"{sign} {limit:.2f}{unit}"
    if value is None:
        return Aim(claim, required, "–", None)
    return Aim(claim, required, f"{value:.3f}{unit}", SIGNS[sign](value, limit))


# --- Kernels, layers, training ---------------------------------------------------------------------------------


def kernel_aim(kernels: list[Result]) -> Aim:
    claim = "kernels at 8192 x 4096 and above: share of a copy's bandwidth"
    shares = [row["share"] for row in kernels if row["shape"][0] * row["shape"][1] >= COPY_ELEMENTS]
    required = f"≥ {COPY_SHARE} each"
    if not shares:
        return Aim(claim, required, "–", None)
    good = sum(share >= COPY_SHARE for share in shares)
    return Aim(claim, required, f"{good} of {len(shares)}, the least {min(shares):.2f}", good == len(shares))


def layer_aims(cells: list[Result]) -> list[Aim]:
    torchao, guarded = gains(cells, "ours", "torchao"), gains(cells, "ours, only if faster", "bf16")
    return [
        least_gain("one layer, ours: speed of torchao", torchao, 1.0),
        least_gain("one layer, ours, only if faster: speed of BF16", guarded, ONLY_IF_FASTER),
    ]


def gains(cells: list[Result], mode: str, other: str) -> list[float]:
    """How much faster `mode` is than `other`, in the cells that have both."""
    return [paired(cell, mode, other) for cell in cells if {mode, other} <= cell["rounds"].keys()]


def paired(cell: Result, mode: str, other: str) -> float:
    """How much faster `mode` is than `other` in a cell: the median of the rounds, in each of which they took turns."""
    rounds: dict[str, list[float]] = cell["rounds"]
    return statistics.median(b / a for a, b in zip(rounds[mode], rounds[other], strict=True))


def least_gain(claim: str, found: list[float], least: float) -> Aim:
    required = f"≥ {least:.2f}x in each cell"
    if not found:
        return Aim(claim, required, "–", None)
    good = sum(gain >= least for gain in found)
    words = f"{good} of {len(found)} cells, the least {min(found):.3f}x, median {statistics.median(found):.3f}x"
    return Aim(claim, required, words, good == len(found))


def parity_aims(parity: Result) -> list[Aim]:
    """One for each mode of ours; the allowance is the larger of the two."""
    required = f"within {PARITY_GAP:.2%}, or BF16's own spread"
    spread = parity["bf16_spread"]
    rows = []
    for mode in [mode for mode in parity["gaps"] if mode != "torchao"] or ["rowwise"]:
        claim = f"a GPT on text, {mode}: mean gap of the final loss to BF16"
        gap = parity["gaps"].get(mode)
        if gap is None:
            rows.append(Aim(claim, required, "–", None))
        else:
            words = f"{gap['mean']:+.3%}, spread {spread:.3%}"
            rows.append(Aim(claim, required, words, abs(gap["mean"]) <= max(PARITY_GAP, spread)))
    times = {row["mode"]: row for row in (parity.get("step_times") or {"steps": []})["steps"]}
    guarded = times.get("rowwise_if_faster", {}).get("ratio")
    rows.append(bound("the same GPT, only if faster: time of a step over BF16, compile", guarded, "≤", 1.0))
    return rows


# --- Serving ---------------------------------------------------------------------------------------------------


def serve_aims(serve: Result) -> list[Aim]:
    """Of a benchmark that may have been cut short."""
    prefill = serve_ms(serve, "prefill")
    ours = min((prefill[mode] for mode in (SERVE_OURS, SERVE_GRAPH) if mode in prefill), default=None)
    found = [
        bound("serving, prefill: speed of BF16, compile", ratio(prefill.get(BASE), ours), "≥", 1.60),
        bound("serving, prefill: speed of torchao's row-wise FP8", ratio(prefill.get(SERVE_TORCHAO), ours), "≥", 1.10),
    ]
    for part, limit in DECODES.items():
        ms = serve_ms(serve, part)
        claim = f"serving, {part.replace(' ', ' of ')}"
        found.append(bound(f"{claim}: speed of BF16, compile", ratio(ms.get(BASE), ms.get(SERVE_OURS)), "≥", limit))
        if SERVE_CACHE in ms:  # older results do not have it
            cached = ratio(ms.get(BASE), ms[SERVE_CACHE])
            found.append(bound(f"{claim}, FP8 KV cache: speed of BF16, compile", cached, "≥", limit))
    for part, limit in (("linears", 0.52), ("model", 0.58)):
        held = {mode: parts[part] for mode, parts in serve.get("memory", {}).items()}
        claim = f"serving, weights in GPU memory: {part}, of BF16's"
        found.append(bound(claim, ratio(held.get("ours"), held.get("bf16")), "≤", limit, ""))
    shares = [row["share"] for row in serve.get("kernels", []) if row["m"] == 1]
    claim = "serving, the GEMM of one row: least share of a copy's bandwidth"
    return [*found, bound(claim, min(shares, default=None), "≥", COPY_SHARE, "")]


def cache_aim(result: Result) -> Aim:
    """Of whole steps of a long context: against the faster of the ways to read a BF16 cache."""
    ms = {row["mode"]: row["median"] for row in result.get("decode", {"modes": []})["modes"]}
    base = min((time for mode, time in ms.items() if mode.startswith("bf16")), default=None)
    claim = "decode of 8 at 32,768 tokens, cache in FP8: speed of one in BF16"
    return bound(claim, ratio(base, ms.get(STEP_FP8)), "≥", 1.40)


def serve_ms(serve: Result, part: str) -> dict[str, float]:
    """Median milliseconds by mode of a part of the result; nothing where it was not reached."""
    return {mode: ms["median"] for mode, ms in serve.get(part, {}).get("ms", {}).items()}
