"""The linear layers of Llama-3-8B by each packing scheme, as `octavo.load` runs them, beside BF16.

A layer quantizes its input in every call. First its output is compared with the float64 product of the operands that it
quantizes, row by row. Then calls are timed: at few tokens by CUDA graphs, over weights that together exceed the L2
cache; at 8,192 tokens in rounds in which BF16 and all schemes take turns. q, k and v are one layer, as gate and up are.

    python -m bench.gpu.schemes [--quick]      --quick: one layer, fewer rounds
"""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench import record
from bench.gpu.gemms import beyond_cache, in_turn
from bench.gpu.llama import GEMMS, TOKENS
from bench.gpu.timing import decibels, interleaved
from octavo.artifact.packed.scheme import SCHEMES, STATIC_INPUTS, Scheme
from octavo.int8 import find_int8_backend
from octavo.numerics import QTensor
from octavo.ops import find_backend, find_weight_only_backend, quantize
from octavo.runtime.packed_linear import PackedLinear

BASE = "bf16"
FEW = (1, 16)  # tokens
LEAST_DB = 40.0  # of a row: the output in BF16 alone has 50 dB


def main() -> None:
    quick = "--quick" in sys.argv
    layers = {"down": GEMMS["down"]} if quick else GEMMS
    rows = []
    for name, (n, k) in layers.items():
        for m in (*FEW, TOKENS):
            rows += [{"layer": name, "m": m, "n": n, "k": k, **row} for row in measure(m, n, k, 3 if quick else 8)]
            for row in rows[-len(SCHEMES) - 1 :]:
                print(row, flush=True)
            torch.cuda.empty_cache()
            record.write("gpu_schemes", {"rows": rows})


def measure(m: int, n: int, k: int, rounds: int) -> list[dict[str, Any]]:
    """A row for BF16 and for each scheme: microseconds of a call, the worst SQNR of a row, and the GEMM's backend."""
    torch.manual_seed(m + n + k)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    copies = beyond_cache(n, k) if m <= max(FEW) else 1
    wide = [linear(n, k) for _ in range(copies)]
    calls: dict[str, list[Callable[[], Tensor]]] = {BASE: [partial(layer, x) for layer in wide]}
    facts: dict[str, dict[str, Any]] = {BASE: {"backend": "torch.mm"}}
    for name, scheme in SCHEMES.items():
        packed = [pack(layer, scheme, x) for layer in wide]
        calls[name], facts[name] = [partial(layer, x) for layer in packed], check(packed[0], x)
    times = microseconds(calls, rounds, few=m <= max(FEW))
    return [{"scheme": name, "us": times[name], **facts[name]} for name in calls]


@torch.no_grad()
def microseconds(calls: Mapping[str, Sequence[Callable[[], Tensor]]], rounds: int, *, few: bool) -> dict[str, float]:
    """The time of a call of each way: with `few` rows over all weights in turn, else of the first, the ways in turn."""
    if few:
        return {name: in_turn(lambda call: call(), each) for name, each in calls.items()}
    times = interleaved({name: each[0] for name, each in calls.items()}, rounds=rounds, repeat=3)
    return {name: 1e3 * statistics.median(ms) for name, ms in times.items()}


def linear(n: int, k: int) -> nn.Linear:
    """A linear layer [N, K] in BF16 with random weights and no bias."""
    with torch.device("cuda"):
        layer = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    nn.init.normal_(layer.weight, std=k**-0.5)
    return layer


def pack(layer: nn.Linear, scheme: Scheme, x: Tensor) -> PackedLinear:
    """The layer packed in memory; a stored scale of the input is that of x."""
    packed = PackedLinear(layer, scheme)
    q = quantize(layer.weight.detach(), scheme.weight)
    packed.weight, packed.weight_scale = q.data, scheme.stored_scale(q)
    if scheme.static:
        packed.input_scale = quantize(x, STATIC_INPUTS).scale.reshape(1)
    return packed


def check(layer: PackedLinear, x: Tensor) -> dict[str, Any]:
    """The worst SQNR of a row, of the first 256, against float64 on the operands that the layer quantizes."""
    operand, w_q = layer.operand(x), layer.packed_weight()
    wide = operand if isinstance(operand, Tensor) else operand.dequantize()
    exact = wide[:256].double() @ w_q.dequantize().double().t()
    with torch.no_grad():
        y = layer(x)[:256].double()
    worst = min(decibels(*pair) for pair in zip(exact, y, strict=True))
    assert worst > LEAST_DB, f"{layer.scheme.name}, {list(x.shape)} x {list(w_q.shape)}: {worst:.1f} dB in a row"
    return {"backend": backend(operand, w_q), "worst_db": worst}


def backend(x: Tensor | QTensor, w_q: QTensor) -> str:
    """The name of the implementation of the GEMM."""
    if isinstance(x, Tensor):
        return find_weight_only_backend(x.device, x.dtype, w_q.granularity, x.shape[0]).name
    if x.format.name == "int8":
        return find_int8_backend(x.data.device).name
    formats, size = (x.format.name, w_q.format.name), (x.shape[0], w_q.shape[0])
    e8m0 = x.scale.dtype == torch.float8_e8m0fnu, w_q.scale.dtype == torch.float8_e8m0fnu
    return find_backend(x.data.device, x.granularity, w_q.granularity, formats, size, e8m0=e8m0).name


if __name__ == "__main__":
    main()
