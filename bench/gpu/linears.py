"""The linear layers of Llama-3-8B in eight bits, as `octavo.load` runs them, beside BF16.

    schemes        each packing scheme; q, k and v are one layer, as gate and up are
    int8           INT8 beside FP8: the layer, our kernel alone on operands that are quantized already, and
                   torch._int_mm, cuBLASLt's GEMM of the same operands to int32 sums without scales
    weight-only    FP8 weights with BF16 inputs, in each way to multiply them, and a decoding step of a Llama by them

A layer quantizes its input in every call. First outputs are compared with the float64 product of the operands, row by
row, and INT8's sums with those of torch._int_mm, bit for bit. Then calls are timed: at few rows by CUDA graphs, over
weights that together exceed the L2 cache, and else in rounds in which the ways take turns. The ways of weight-only are

    w8a8           octavo.ops.scaled_mm, with the quantization of x
    weight-only    octavo.ops.weight_only_mm, as it chooses
    kernel, native and kernel, bytes       its kernel, which widens E4M3 by the GPU's conversion, or by the integer
                                           instructions of older GPUs
    dequantized    the weight widened to BF16, then torch's product

    python -m bench.gpu.linears [--only int8]
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bench.gpu import harness
from bench.gpu.harness import DEVICE, Options, Results, Row, benchmark, sized
from bench.gpu.kernels import bf16
from bench.gpu.llama import CONFIG, GEMMS, TOKENS
from bench.gpu.serve import weight_only_step
from octavo.checkpoint.scheme import CHANNEL, INT8, SCHEMES, STATIC_INPUTS, Scheme
from octavo.inference.packed_linear import PackedLinear
from octavo.numerics import ROW, QTensor
from octavo.ops import find_backend, find_weight_only_backend, quantize, scaled_mm, weight_only_mm
from octavo.ops.dispatch import find_int8_backend
from octavo.ops.int8_gemm import int8_mm
from octavo.ops.kernels import weight_only as kernel
from octavo.recipe import ROW_W, ROW_X

Calls = Mapping[str, Sequence[Callable[[], Tensor]]]
FEW = 16  # rows, up to which the time of a call is that of reading the weight
LEAST_INT_MM = 17  # rows that torch._int_mm takes
LEAST_DB = 40.0  # of a row: the output in BF16 alone has 50 dB
LEAST_OF = {"w8a8": 25.0}  # against the float64 product of x and the packed weight; 45 of the other ways


def measure_all(result: str, key: str, measure: Callable[..., list[Row]], ms: Sequence[int], **more: Any) -> Results:
    """The rows of every layer at every number of rows."""
    rows: list[Row] = []
    for layer, (n, k) in list(GEMMS.items())[sized(0, -1) :]:
        for m in ms[: sized(len(ms), 2)]:
            torch.manual_seed(m + n + k)
            rows += [{"layer": layer, "m": m, "n": n, "k": k, **row} for row in measure(m, n, k)]
            torch.cuda.empty_cache()
            yield result, {**more, key: rows}


@torch.no_grad()
def microseconds(calls: Calls, *, few: bool) -> dict[str, float]:
    """The time of a call of each way: with `few` rows over all weights in turn, else of the first, the ways in turn."""
    if few:
        return {name: harness.in_turn(lambda call: call(), each) for name, each in calls.items()}
    ms = harness.medians(harness.interleaved({name: each[0] for name, each in calls.items()}, rounds=8, repeat=3))
    return {name: 1e3 * took for name, took in ms.items()}


def linear(n: int, k: int) -> nn.Linear:
    """A linear layer [N, K] in BF16 with random weights and no bias."""
    with torch.device(DEVICE):
        layer = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
    nn.init.normal_(layer.weight, std=k**-0.5)
    return layer


def layers_of(m: int, n: int, k: int) -> list[nn.Linear]:
    return [linear(n, k) for _ in range(harness.beyond_cache(n, k) if m <= FEW else 1)]


def least_decibels(exact: Tensor, actual: Tensor, least: float) -> float:
    """The SQNR of the worst row, which must exceed `least`."""
    return min(harness.each_decibels(exact, actual.double(), least))


# --- Schemes ---------------------------------------------------------------------------------------------------


def schemes(m: int, n: int, k: int) -> list[Row]:
    """A row for BF16 and for each scheme: microseconds of a call, the worst SQNR of a row, and the GEMM's backend."""
    x, wide = bf16(m, k), layers_of(m, n, k)
    calls: dict[str, list[Callable[[], Tensor]]] = {"bf16": [partial(layer, x) for layer in wide]}
    facts: dict[str, Row] = {"bf16": {"backend": "torch.mm"}}
    for name, scheme in SCHEMES.items():
        packed = [pack(layer, scheme, x) for layer in wide]
        calls[name], facts[name] = [partial(layer, x) for layer in packed], check(packed[0], x)
    times = microseconds(calls, few=m <= FEW)
    return [{"scheme": name, "us": times[name], **facts[name]} for name in calls]


def pack(layer: nn.Linear, scheme: Scheme, x: Tensor) -> PackedLinear:
    """The layer packed in memory; a stored scale of the input is that of x."""
    packed = PackedLinear(layer, scheme)
    q = quantize(layer.weight.detach(), scheme.weight)
    packed.weight, packed.weight_scale = q.data, scheme.stored_scale(q)
    if scheme.static:
        packed.input_scale = quantize(x, STATIC_INPUTS).scale.reshape(1)
    return packed


def check(layer: PackedLinear, x: Tensor) -> Row:
    """The worst SQNR of a row, of the first 256, against float64 on the operands that the layer quantizes."""
    operand, w_q = layer.operand(x), layer.packed_weight()
    wide = operand if isinstance(operand, Tensor) else operand.dequantize()
    with torch.no_grad():
        exact = wide[:256].double() @ w_q.dequantize().double().t()
        worst = least_decibels(exact, layer(x)[:256], LEAST_DB)
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


# --- INT8 ------------------------------------------------------------------------------------------------------


def int8(m: int, n: int, k: int) -> list[Row]:
    """Microseconds of a call of each way, and the worst SQNR of a row of each layer."""
    x, wide = bf16(m, k), layers_of(m, n, k)
    packed = {scheme.name: [pack(layer, scheme, x) for layer in wide] for scheme in (CHANNEL, INT8)}
    worst = {name: check(layers[0], x)["worst_db"] for name, layers in packed.items()}
    operands: list[tuple[Any, QTensor]] = [(layer.operand(x), layer.packed_weight()) for layer in packed[INT8.name]]
    calls: dict[str, list[Callable[[], Tensor]]] = {"bf16": [partial(layer, x) for layer in wide]}
    calls |= {name: [partial(layer, x) for layer in layers] for name, layers in packed.items()}
    calls["int8 GEMM"] = [partial(int8_mm, a, b) for a, b in operands]
    if m >= LEAST_INT_MM:
        calls["torch._int_mm"] = [partial(int_mm, a, b) for a, b in operands]
        a, b = (QTensor(q.data, torch.ones_like(q.scale), q.format, q.granularity) for q in operands[0])
        assert torch.equal(int8_mm(a, b, out_dtype=torch.float32), int_mm(a, b).float()), (m, n, k)
    return [{"us": microseconds(calls, few=m <= FEW), "worst_db": worst}]


def int_mm(a: QTensor, b: QTensor) -> Tensor:
    """int32 [M, N]."""
    return torch._int_mm(a.data, b.data.t())  # [M,K] @ [K,N]


# --- Weights alone ---------------------------------------------------------------------------------------------


def weight_only(m: int, n: int, k: int) -> list[Row]:
    """Microseconds of each way, over weights that exceed the L2 cache, and the worst SQNR of a row."""
    x = bf16(m, k)
    wide = [bf16(n, k) for _ in range(harness.beyond_cache(n, k))]
    packed = [quantize(w, ROW_W) for w in wide]
    exact = x.double() @ packed[0].dequantize().double().t()
    worst, us = {}, {"bf16": harness.in_turn(lambda w: x @ w.t(), wide)}
    for name, way in ways(x).items():
        worst[name] = least_decibels(exact, way(packed[0]), LEAST_OF.get(name, 45))
        us[name] = harness.in_turn(way, packed)
    return [{"us": us, "worst_db": worst, "runs": find_weight_only_backend(x.device, x.dtype, ROW, m).name}]


def ways(x: Tensor) -> dict[str, Callable[[QTensor], Tensor]]:
    """The ways to multiply x [M, K] with a packed weight [N, K]."""

    def by_kernel(native: bool, w: QTensor) -> Tensor:
        return kernel.weight_only_mm(x, w.data, w.scale, ROW, None, None, native=native)

    return {
        "w8a8": lambda w: scaled_mm(quantize(x, ROW_X), w, fast_accumulation=True),
        "weight-only": lambda w: weight_only_mm(x, w),
        "kernel, native": partial(by_kernel, True),
        "kernel, bytes": partial(by_kernel, False),
        "dequantized": lambda w: x @ kernel.dequantize(w.data, w.scale, ROW, torch.bfloat16).t(),
    }


@benchmark(only="", layers=CONFIG.layers)
def main(options: Options) -> Results:
    if options.only in ("", "schemes"):
        yield from measure_all("gpu_schemes", "rows", schemes, (1, 16, TOKENS))
    if options.only in ("", "int8"):
        yield from measure_all("gpu_int8", "rows", int8, (1, 16, 512, TOKENS))
    if options.only in ("", "weight-only"):
        decode = {"layers": options.layers, "decode": weight_only_step(options.layers)}
        yield from measure_all("gpu_weight_only", "gemms", weight_only, (1, 4, 16, 64, 128, 256, 512, 4096), **decode)
