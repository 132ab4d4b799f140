"""Four layers of Llama-3-8B's shape, 8,192 tokens, BF16 weights, forward and backward: every mode in one process.

A step includes the cast of the weights, as after every optimizer step; only "kept" leaves it out, as the later
micro-batches of an accumulation do (`octavo.scales.cast_once`). First come the peak memory of each mode, and its
outputs and gradients against BF16. Then the modes take turns and are timed, and the profiler sums kernels by category.
The floor is the time of the GEMMs and the attention at the rates that bench.gpu.ceilings measured, and of all other
bytes at the speed of a copy.

    python -m bench.gpu.stack
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

import octavo
from bench.gpu import harness, llama
from bench.gpu.harness import DEVICE, Options, Results, benchmark, sized
from bench.gpu.llama import GEMMS, KV_WIDTH, MLP_WIDTH, TOKENS, WIDTH, Fused, Plain
from bench.gpu.modes import BASE, FUSED, FUSED_EAGER, FUSED_GRAPH, PLAIN
from bench.gpu.ranks import kernels_of, split
from bench.gpu.variants import use_torchao
from octavo.models.llama import LlamaConfig

CONFIG = replace(llama.CONFIG, layers=sized(4, 2))

# What makes a model, what converts it, by which recipe, and what of it is compiled: the "whole", its "blocks", or "".
Mode = tuple[Callable[[LlamaConfig], nn.Module], Callable[[nn.Module, Any], Any] | None, Any, str]
MODES: dict[str, Mode] = {
    "bf16, eager": (Plain, None, "", ""),
    BASE: (Plain, None, "", "whole"),
    FUSED: (Fused, octavo.convert, "rowwise", "whole"),
    FUSED_EAGER: (Fused, octavo.convert, "rowwise", ""),
    PLAIN: (Plain, octavo.convert, "rowwise", "whole"),
    "ours plain: rowwise, eager": (Plain, octavo.convert, "rowwise", ""),
    "ours plain: tensorwise, compile": (Plain, octavo.convert, "tensorwise", "whole"),
    "ours plain: delayed, compile": (Plain, octavo.convert, "delayed", "whole"),
    "ours plain: rowwise_dw_bf16, compile": (Plain, octavo.convert, "rowwise_dw_bf16", "whole"),
    "ours plain: blockwise, compile": (Plain, octavo.convert, "blockwise", "whole"),
    "torchao: tensorwise, compile": (Plain, use_torchao, "tensorwise", "whole"),
    "torchao: rowwise_with_gw_hp, compile": (Plain, use_torchao, "rowwise_with_gw_hp", "whole"),
    "torchao: rowwise, compile": (Plain, use_torchao, "rowwise", "whole"),
}
PROFILED = (BASE, FUSED, PLAIN)


class Runner(harness.Passes):
    """A mode's model and its step."""

    def __init__(self, mode: Mode, config: LlamaConfig = CONFIG, tokens: int = TOKENS) -> None:
        make, convert, recipe, compiled = mode
        with torch.device(DEVICE):
            model = make(config).to(torch.bfloat16)
        harness.draw_matrices(model)
        if convert is not None:
            convert(model, recipe)
        super().__init__(model, *harness.llama_inputs(config, tokens))
        if compiled == "whole":
            self.compile()
        for block in model.layers if compiled == "blocks" else ():  # type: ignore[union-attr]
            block.compile()
        if convert is octavo.convert and str(getattr(recipe, "name", recipe)).startswith("delayed"):
            self.after = octavo.scales.update_scales


def categories(step: Callable[[], object], steps: int = 3) -> dict[str, Any]:
    """Milliseconds a step of GEMMs, attention and the rest, by the names of the kernels; and the longest kernels, each
    with its calls and its milliseconds a step."""
    kernels, times = kernels_of(step, steps), dict[str, list[float]]()
    for name, begin, end in kernels:
        times.setdefault(name, []).append((end - begin) / 1e3 / steps)
    rows: list[Any] = [[name, len(ms) // steps, sum(ms)] for name, ms in times.items()]
    sums = {kind: split(kernels)[kind] / 1e3 / steps for kind in ("gemm", "attention", "rest")}
    return {**sums, "kernels": sorted(rows, key=lambda row: -row[2])[:20]}


def floor(ceilings: dict[str, Any], way: dict[str, str], *, cast: bool) -> dict[str, float]:
    """Milliseconds below which a fused rowwise step cannot come, by the measured ceilings.

    `way` names the measured GEMM of y, dx and dw. The bytes of a layer below are in units of TOKENS * WIDTH elements.
    """
    rates = {(row["layer"], row["gemm"]): row["tflops"] for row in ceilings["gemm"]}
    flops = {name: 2 * TOKENS * n * k for name, (n, k) in GEMMS.items()}
    gemm = sum(flops[name] / rates[name, which][way[which]] / 1e9 for name in GEMMS for which in way)
    f, qkv = MLP_WIDTH / WIDTH, (WIDTH + 2 * KV_WIDTH) / WIDTH
    forward = 7 + 4 * (1 + KV_WIDTH / WIDTH) + 3 + 7 + 5 * f  # norm, rope, cast of attention's output, norm, SwiGLU
    incoming = 3 + 3 + 3 * qkv  # casts of the gradients of y at down, o and q, k, v
    backward = 9 * f + f + 8 + 8 + 4 * qkv  # SwiGLU and its output again, two norms, rope
    turned = 2 * (1 + 1 + qkv + 2 * f) + 2 * (f + 1) + 2 * 3  # gradients; h, attention's output; the norms' outputs
    weights = sum(n * k for n, k in GEMMS.values()) * ((3 if cast else 0) + (3 if cast else 2))
    moved = (forward + incoming + backward + turned) * TOKENS * WIDTH + weights
    rest = moved / ceilings["copy"] / 1e9
    layer = {"gemm": gemm, "attention": ceilings["attention_ms"], "rest": rest}
    parts = {name: CONFIG.layers * ms for name, ms in layer.items()}
    return parts | {"total": sum(parts.values()), "gigabytes_a_layer": moved / 1e9}


def keep(runners: dict[str, Runner]) -> dict[str, Any]:
    """Times of BF16 and ours with cached weights, as in the later micro-batches of an accumulation."""
    steps = {mode: runners[mode].step for mode in (BASE, FUSED)}
    with octavo.scales.cast_once(runners[FUSED].model):
        ms = harness.medians(harness.interleaved(steps, rounds=5, repeat=4))
    return {"ms": ms, "ratio": ms[BASE] / ms[FUSED]}


@benchmark()
def main(_: Options) -> Results:
    modes = [name for name in MODES if not name.startswith("torchao") or harness.installed("torchao")]
    runners, peaks = harness.built({name: partial(Runner, MODES[name]) for name in modes})
    checks = harness.checked(BASE, runners)  # of the output and the input's gradient
    steps: dict[str, Callable[[], object]] = {name: runner.step for name, runner in runners.items()}
    steps[FUSED_GRAPH] = harness.captured(runners[FUSED].step)
    times = harness.interleaved(steps, rounds=6, repeat=4, warmup=1)
    gb = {name: peak / 1e9 for name, peak in peaks.items()}
    rows = [{"mode": name, **row, "peak_gb": gb.get(name)} for name, row in harness.rows_of(times, BASE).items()]
    ceilings = harness.result_before("gpu_ceilings")
    way = {"y": "row, fast", "dx": "row, fast", "dw": "row"}
    result = {
        "modes": rows,
        "kept": keep(runners),
        "profiles": {name: categories(runners[name].step) for name in PROFILED},
        "floors": {name: floor(ceilings, way, cast=name == "cast") for name in ("cast", "kept") if ceilings},
        "sqnr": checks,
    }
    yield "gpu_stack", result
