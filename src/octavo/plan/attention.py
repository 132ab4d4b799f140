"""The attention of a plan, in BF16 or in FP8: its time, where it runs in FP8, and by how much that is faster.

The forward pass is two GEMMs and the backward pass five, each of 2 FLOPs for a query, a key and an element of a head:
14 T S H FLOPs for T tokens of texts of S, with H elements in all heads. Kernels compute whole tiles of TILE tokens. In
causal attention a query sees (S + TILE) / 2 keys. cuDNN has kernels for heads of 64, 128, 192 and 256 elements
(github.com/NVIDIA/cudnn-frontend/issues/378); other heads are padded with zeros to the next.

Each pass also takes an exponential of each score, T S of them a head, whatever the width of the head. They run on other
units than the products, and between them: Shah et al. (arXiv:2407.08608) count 3.9 * 10^12 exponentials
a second of an H100 beside 989 * 10^12 FLOPs. So narrow heads have a lower rate in FLOPs.

The products run at the rate of `octavo.plan.hardware`, which was measured with heads of 128 elements. Around those of
the backward pass, cuDNN has kernels that only move bytes: one multiplies dO with O and zeroes dq in FP32, one casts
dq to BF16, and one sums dk and dv over the query heads that share a key head. The speed of FP8 over
BF16 was measured by the length of a text (bench.gpu.attention, casts included; `make docs` writes
attention_speeds.json) with 32 heads of queries and 8 of keys. Between two lengths it is interpolated; beyond them it is
that of the nearest.
"""

import functools
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from octavo.nn.quantized_attention import SHORTEST
from octavo.nn.speedup.table import interpolate_along
from octavo.ops import fp8_attention_limit
from octavo.ops.attention_fp8 import GRADIENT_TILE
from octavo.ops.gpu_architecture import ARCHITECTURES
from octavo.plan.architecture import Architecture, Attention, Block
from octavo.plan.hardware import Gpu
from octavo.plan.setup import Setup

TILE = 128  # tokens
EXPONENTIAL = 256  # FLOPs: Hopper's multiprocessors compute 4,096 of them, or 16 exponentials, in a clock
MEASURED_HEAD = 128  # elements of the heads whose rate was measured
HEADS = (64, 128, 192, 256)  # elements of the heads that cuDNN has kernels for
FORWARD = 0.25  # of the time of the products in BF16, measured there from 4,096 tokens on; its FLOPs are 2/7


def attention_seconds(block: Block, gpu: Gpu, tokens: int, context: int) -> tuple[float, float]:
    """Seconds of both passes in BF16, and of the forward pass, of `tokens` tokens in texts of `context`."""
    a, whole = block.attention, -(-context // TILE) * TILE
    keys = (whole + TILE) / 2 if a.causal else whole
    heads = a.heads * (_padded(a.queries // a.heads) + _padded(a.output // a.heads))
    products = 7 * heads  # FLOPs of a query and a key
    measured = 14 * MEASURED_HEAD
    as_measured = (products + 2 * EXPONENTIAL * a.heads) * measured / (measured + 2 * EXPONENTIAL)
    seconds = tokens * whole / context * keys * as_measured / gpu.attention_rate
    return seconds + tokens * gradient_bytes(a) / gpu.copy_rate, FORWARD * seconds


def gradient_bytes(attention: Attention) -> float:
    """Bytes that the backward pass moves beside its products, for each token."""
    a = attention
    shared = 2 * (a.queries + a.output + a.keys + a.values) if a.keys < a.queries else 0
    return 4 * a.output + (4 + 6) * a.queries + shared


def _padded(head: int) -> int:
    return next((size for size in HEADS if size >= head), head)


def fp8_limit(model: Architecture, gpu: Gpu) -> str:
    """Why the attention of `model` does not run in FP8 on `gpu`; "" if it does."""
    a = model.blocks[0].attention
    if not a.causal:
        return f"FP8 attention is causal, and that of {model.name} is not"
    if a.queries != a.output:
        return f"FP8 attention takes queries and values of one size, and those of {model.name} differ"
    return fp8_attention_limit(ARCHITECTURES[gpu.architecture], a.queries // a.heads)


def training_limit(setup: Setup) -> str:
    """Why the attention of a training run is not in FP8, although its settings ask for it; "" if it is."""
    context, shortest = setup.config.context, setup.config.attention.shortest
    if context < shortest:
        return f"texts of {context:,} tokens are shorter than attention.shortest, {shortest:,}"
    if context % GRADIENT_TILE:
        return f"{context:,} tokens are no multiple of {GRADIENT_TILE}"
    return fp8_limit(setup.model, setup.gpu)


def is_fp8(setup: Setup) -> bool:
    """Whether the attention of a training run is in FP8."""
    return setup.config.attention.precision == "fp8" and not training_limit(setup)


def speed_if_fp8(setup: Setup) -> float | None:
    """The speed of attention in FP8, forward and backward, as a multiple of that in BF16.

    None where attention does not run in FP8, or texts are shorter than those that it is meant for.
    """
    context = setup.config.context
    long = context >= SHORTEST and context % GRADIENT_TILE == 0
    return fp8_speed("forward and backward", context) if long and not fp8_limit(setup.model, setup.gpu) else None


def fp8_speed(passes: str, tokens: int) -> float:
    """The speed of FP8 over BF16 in `passes`: forward, forward and backward, or forward from an FP8 KV cache."""
    return interpolate_along(_speeds()[passes], tokens)


@functools.cache
def _speeds() -> Mapping[str, Mapping[int, float]]:
    found: dict[str, Any] = json.loads((files("octavo.plan") / "attention_speeds.json").read_text())
    return {passes: {int(length): speed for length, speed in row.items()} for passes, row in found["speeds"].items()}
