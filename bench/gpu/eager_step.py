"""The host's time for an eager decoding step of transformers' Llama, in BF16 and packed.

The layers have the shape of Llama-3-8B and random weights. Two models decode one token after 256 others: BF16 with
transformers' own cache and SDPA, and the packed layers with a BF16 `QuantizedKVCache`. For each batch it prints the
microseconds of a layer, as the host launches it and as the step takes, and the kernels of a layer; then the functions
in which the packed model spends the host's time.

    python -m bench.gpu.eager_step [--layers 4] [--profile 25]
"""

import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from bench.gpu import llama
from bench.gpu.serve_models import build_bf16, build_fp8
from octavo.kv_cache.transformers_cache import QuantizedKVCache
from octavo.runtime.fused import fuse

PROMPT, ROOM, BATCHES = 256, 1024, (1, 16, 64)
STEPS, ROUNDS = 8, 12  # so few that the host never waits for the queue of launches

Step = Callable[[], Any]


def main() -> None:
    layers = _option("--layers", 4)
    wide = build_bf16(replace(llama.CONFIG, layers=layers), "cuda")
    packed = build_fp8(wide, "cuda")
    fuse(packed)
    for model in (wide, packed):
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.layer_idx = number
    print(f"{'batch':>5} {'model':>7} {'host us/layer':>14} {'step us/layer':>14} {'host us/rest':>13} kernels/layer")
    for batch in BATCHES:
        for name, model in (("bf16", wide), ("packed", packed)):
            host, whole, rest, kernels = measure(model, name == "packed", batch, layers)
            print(f"{batch:5} {name:>7} {host:14.0f} {whole:14.0f} {rest:13.0f} {kernels:.1f}", flush=True)
    step = step_of(packed, True, 1)
    print_kernels(step, layers)
    print_functions(step, _option("--profile", 25))


def step_of(model: Any, ours: bool, batch: int) -> Step:
    """A decoding step after a prompt."""
    ids = torch.randint(0, model.config.vocab_size, (batch, PROMPT), device="cuda")
    cache: Any
    if ours:
        cache = QuantizedKVCache.for_model(model, ROOM, "bf16")
    else:
        model.set_attn_implementation("sdpa")
        cache = DynamicCache(config=model.config)

    @torch.inference_mode()
    def run(tokens: Tensor) -> Any:
        return model(tokens, past_key_values=cache, use_cache=True)

    run(ids)
    step = partial(run, ids[:, :1].clone())
    step()
    return step


def measure(model: Any, ours: bool, batch: int, layers: int) -> tuple[float, float, float, float]:
    """Microseconds of the host and of the step per layer, of the host outside the layers, and kernels per layer."""
    step = partial(step_of, model, ours, batch)
    host, whole = timed(step)
    count = _kernels(step())
    model.config.num_hidden_layers = 0  # transformers' forward runs so many of the layers
    try:
        none, rest = _kernels(step()), timed(step)
    finally:
        model.config.num_hidden_layers = layers
    return (host - rest[0]) / layers, (whole - rest[1]) / layers, rest[0], (count - none) / layers


def timed(make: Callable[[], Step]) -> tuple[float, float]:
    """Median microseconds of a step: until the host has launched it, and until the device has run it.

    Each round decodes the same tokens, after the same prompt. For each new length of the context, PyTorch's attention
    of BF16 makes a plan, which takes tens of milliseconds; the first round makes them.
    """
    host, whole = [], []
    for _ in range(ROUNDS + 1):
        step = make()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            step()
        launched = time.perf_counter()
        torch.cuda.synchronize()
        host.append((launched - begin) / STEPS * 1e6)
        whole.append((time.perf_counter() - begin) / STEPS * 1e6)
    return statistics.median(host[1:]), statistics.median(whole[1:])


def _events(step: Step) -> Any:
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        step()
        torch.cuda.synchronize()
    return [event for event in profiler.events() or () if event.device_type.name == "CUDA"]


def _kernels(step: Step) -> int:
    return len(_events(step))


def print_kernels(step: Step, layers: int) -> None:
    """The kernels of a step by name, with their number a layer and the microseconds of one."""
    found: dict[str, list[float]] = {}
    for event in _events(step):
        found.setdefault(event.name, []).append(event.time_range.elapsed_us())
    print("\nkernels of a step of the packed model, batch 1")
    for name, times in sorted(found.items(), key=lambda item: -sum(item[1])):
        print(f"{len(times) / layers:6.2f} a layer, {statistics.median(times):8.1f} us each: {name[:110]}")


def print_functions(step: Step, lines: int) -> None:
    print("\nhost functions of 50 steps of the packed model, batch 1")
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(50):
        step()
    profiler.disable()
    for order in ("tottime", "cumtime"):
        pstats.Stats(profiler).sort_stats(order).print_stats(lines)


def _option(name: str, default: int) -> int:
    return int(sys.argv[sys.argv.index(name) + 1]) if name in sys.argv else default


if __name__ == "__main__":
    main()
