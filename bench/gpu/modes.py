"""The names of the modes that the GPU benchmarks measure and that the pages compare."""

import statistics
from typing import Any

BASE = "bf16, compile"
# of the layer stack
FUSED, FUSED_EAGER, FUSED_GRAPH = (f"ours fused: rowwise, {how}" for how in ("compile", "eager", "CUDA graph"))
PLAIN = "ours plain: rowwise, compile"
# of FSDP2
WIDE, OURS = "octavo: rowwise, gathered in BF16", "octavo: rowwise, gathered in FP8"
TORCHAO = "torchao: tensorwise, gathered in FP8"
# of serving
SERVE, SERVE_GRAPH, SERVE_TORCHAO = "ours, compile", "ours, compile, CUDA graph", "torchao, compile"
SERVE_FP8_CACHE = "ours, FP8 KV cache"
SERVE_FP8_ATTENTION = "ours, compile, FP8 attention"
ENGINE, ENGINE_FP8_ATTENTION = "octavo.load, FP8 cache", "octavo.load, FP8 cache, FP8 attention"
# of decoding with weights alone in FP8
W8A8, WEIGHT_ONLY, WEIGHT_ONLY_EAGER = "W8A8, compile", "weight-only, compile", "weight-only, eager"
# of `generate`
OCTAVO, HOOKED, FP8_CACHE = "octavo", "octavo, eager", "octavo, FP8 cache"
EAGER, STATIC = "BF16, eager", "BF16, static"
# of whole decoding steps by cache
CACHE_TORCH, CACHE_BF16, CACHE_FP8 = "bf16 cache, torch's attention", "bf16 cache, ours", "fp8 cache, ours"


def speedup(cell: dict[str, Any], mode: str, other: str) -> float:
    """The speed of `mode` as a multiple of that of `other`: the median over rounds in which the modes took turns."""
    rounds: dict[str, list[float]] = cell["rounds"]
    return statistics.median(b / a for a, b in zip(rounds[mode], rounds[other], strict=True))
