"""A layer of experts with its routing, forward and backward, compiled: BF16's grouped GEMMs, ours and torchao's.

Two shapes: Mixtral's (8 experts of 4096 x 14336, top 2) and one of many small experts (128 of 2048 x 768, top 8). The
outputs and gradients come first, against BF16, for the layer and for one grouped linear layer alone; then the grouped
GEMMs alone, in each way of accumulating; then the modes take turns.

`packed` measures the experts of a packed folder as `octavo.load` runs them, forward, against BF16's grouped GEMMs. The
routing of a token is drawn at random. Decoding (few tokens) runs as a CUDA graph.

`kernels` measures the grouped GEMMs of row scales on a Hopper: our Triton kernel beside PyTorch's CUTLASS kernel and
BF16's. They are y, dx and dw of the inner layer, with promoted and with fast accumulation, and with E5M2 gradients,
which CUTLASS's kernel does not take. Scales are ones. The SQNR against a BF16 product of the same operands comes first,
and must be above 20 dB. Then the kernels take turns. Change the choice in octavo.ops.dispatch by the table.

    python -m bench.gpu.moe [--only layer|packed|kernels]
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gpu import harness
from bench.gpu.harness import DEVICE, Options, Results, benchmark, sized
from bench.gpu.modes import speedup
from octavo.checkpoint.scheme import get_scheme
from octavo.inference.packed_experts import PackedExperts, PackedGroupedLinear
from octavo.nn import Experts, GroupedLinear
from octavo.numerics import ROW, Cast
from octavo.ops import aligned_groups, grouped_mm, grouped_mm_dw, quantize, quantize_matrices, sort_by_expert, transpose
from octavo.ops import library_gemms as cutlass
from octavo.ops.launching import Operands, compile_only
from octavo.recipe import ROW_W, ROW_X, Recipe, blockwise, mxfp8, rowwise


@dataclass(frozen=True)
class Shape:
    """Experts of `width` x `mlp_width`; `tokens` of which each runs through `top_k`."""

    experts: int
    width: int
    mlp_width: int
    top_k: int
    tokens: int

    @property
    def rows(self) -> int:
        return self.tokens * self.top_k


SHAPES = sized(
    {"mixtral": Shape(8, 4096, 14336, 2, 16384), "small experts": Shape(128, 2048, 768, 8, 8192)},
    {"mixtral": Shape(4, 256, 128, 2, 256)},  # 128 rows of an expert, which dw needs
)

SCHEMES = ("channel", "static", "block", "group128", "mx", "weight")
TOKENS = {"decode": sized([1, 16], [2]), "prefill": sized([512, 8192], [8])}
LEAST_DB = 15.0  # two quantizations in a row leave 23 dB
BF16 = torch.bfloat16
ACCUMULATION = {"promoted": False, "fast": True}


class Layer(nn.Module):
    """A router in float32 and its experts."""

    def __init__(self, shape: Shape, experts: type[Experts]) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = experts(shape.experts, shape.width, shape.mlp_width)

    def forward(self, x: Tensor) -> Tensor:
        chosen, index = torch.topk(F.softmax(self.router(x).float(), -1), self.top_k, -1)
        return self.experts(x, index, chosen / chosen.sum(-1, keepdim=True))


torchao_mm: Any = None  # torchao's grouped product, a Triton kernel. torch.compile cannot trace its import
if harness.installed("torchao") and harness.installed("triton"):
    grouped = importlib.import_module("torchao.prototype.moe_training.fp8_grouped_mm")
    torchao_mm = grouped._to_fp8_rowwise_then_scaled_grouped_mm


class TorchaoExperts(Experts):
    """torchao's grouped GEMMs. They take groups in multiples of 16 rows, so zero rows stand between the groups."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        slot, row, offsets = sort_by_expert(top_k_index, self.down_proj.shape[0])
        _, ends, place, _ = aligned_groups(offsets, len(slot))
        numbers = torch.arange(len(place), device=place.device, dtype=torch.int32).where(place >= 0, 0)
        where = torch.zeros_like(slot).scatter_reduce(0, place.clamp(min=0).long(), numbers, "amax")
        n = hidden_states[slot[place.clamp(min=0)] // top_k_index.shape[1]] * (place >= 0).unsqueeze(1)
        options = {"offs": ends, "pad_token_groups_for_grouped_mm": False}
        gate, up = torchao_mm(n, self.gate_up_proj.transpose(1, 2), **options).chunk(2, 1)
        y = torchao_mm(F.silu(gate) * up, self.down_proj.transpose(1, 2), **options)
        return (y[where[row]].float() * top_k_weights.float().unsqueeze(2)).sum(1).to(y.dtype)


MODES: dict[str, tuple[type[Experts], Recipe | None]] = {
    "bf16": (Experts, None),
    "ours": (Experts, rowwise()),
    "ours, blockwise": (Experts, blockwise()),
    "ours, mxfp8": (Experts, mxfp8()),
    **({} if torchao_mm is None else {"torchao": (TorchaoExperts, None)}),
}


class Runner(harness.Passes):
    """A mode's layer and its step, which returns y, dx and the gradients of both weights."""

    def __init__(self, mode: str, shape: Shape) -> None:
        experts, recipe = MODES[mode]
        torch.manual_seed(0)
        with torch.device(DEVICE):
            layer = Layer(shape, experts).to(torch.bfloat16)
            x, dy = (torch.randn(shape.tokens, shape.width, dtype=torch.bfloat16) for _ in range(2))
        layer.experts.recipe = recipe
        super().__init__(layer, (x,), dy, [getattr(layer.experts, name) for name in Experts.matrices])
        self.compile()


def accuracy_of_one_layer(shape: Shape) -> dict[str, float]:
    """The SQNR of y, dx and dw of a grouped linear layer against BF16, as of a dense layer."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        layer = GroupedLinear(shape.experts, shape.width, 2 * shape.mlp_width).to(torch.bfloat16)
        x = torch.randn(shape.rows, shape.width, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(shape.rows, 2 * shape.mlp_width, dtype=torch.bfloat16)
        cuts = torch.randint(shape.rows, (shape.experts - 1,)).sort().values
        offsets = torch.cat([cuts, cuts.new_full((1,), shape.rows)]).to(torch.int32)
    found = []
    for recipe in (None, rowwise()):
        layer.recipe, x.grad, layer.weight.grad = recipe, None, None
        y = layer(x, offsets)
        y.backward(dy)
        found.append((y.detach(), x.grad, layer.weight.grad))
    return {name: harness.decibels(*pair) for name, *pair in zip(("y", "dx", "dw"), *found, strict=True)}


class Products:
    """The operands of the three GEMMs of an inner layer, in BF16 and quantized, and the GEMMs in BF16."""

    def __init__(self, shape: Shape) -> None:
        e, k, n, m = shape.experts, shape.width, 2 * shape.mlp_width, shape.rows
        with torch.device(DEVICE):
            self.offsets = (torch.arange(1, e + 1) * (m // e)).to(torch.int32)
            self.x, self.dy = torch.randn(m, k, dtype=torch.bfloat16), torch.randn(m, n, dtype=torch.bfloat16)
            self.w = torch.randn(e, n, k, dtype=torch.bfloat16)
        self.x_q, self.dy_q = quantize(self.x, ROW_X), quantize(self.dy, ROW_X)
        self.w_q = quantize_matrices(self.w, ROW_W)
        self.wt_q = quantize_matrices(self.w.transpose(1, 2).contiguous(), ROW_W)
        self.x_t, self.dy_t = transpose(self.x_q.data), transpose(self.dy_q.data)
        self.scale = torch.ones(e, n, 1, device=DEVICE)
        self.flops = 2 * m * n * k

    def in_bf16(self) -> dict[str, Callable[[], Tensor]]:
        return {
            "y": lambda: F.grouped_mm(self.x, self.w.transpose(1, 2), offs=self.offsets),
            "dx": lambda: F.grouped_mm(self.dy, self.w, offs=self.offsets),
            "dw": lambda: F.grouped_mm(self.dy.t(), self.x, offs=self.offsets),
        }

    def tflops(self, ways: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
        ms = harness.medians(harness.interleaved(ways, rounds=5, repeat=3))
        return {way: round(self.flops / took / 1e9, 1) for way, took in ms.items()}


def gemms(shape: Shape) -> dict[str, float]:
    """TFLOP/s of the three GEMMs of the inner layer: BF16, and ours with promoted and with fast accumulation."""
    p = Products(shape)
    ways = {f"{gemm}, bf16": way for gemm, way in p.in_bf16().items()}
    for how, fast in ACCUMULATION.items():
        ways[f"y, {how}"] = partial(grouped_mm, p.x_q, p.w_q, p.offsets, fast_accumulation=fast)
        ways[f"dx, {how}"] = partial(grouped_mm, p.dy_q, p.wt_q, p.offsets, fast_accumulation=fast)
        ways[f"dw, {how}"] = partial(grouped_mm_dw, p.dy_t, p.scale, p.x_t, p.offsets, fast_accumulation=fast)
    return p.tflops(ways)


def measure(shape: Shape) -> dict[str, Any]:
    modes, _ = harness.built({mode: partial(Runner, mode, shape) for mode in MODES})
    of = ("y", "dx", *(f"d{name}" for name in Experts.matrices))
    db = {mode: dict(zip(of, found, strict=True)) for mode, found in harness.checked("bf16", modes).items()}
    result = {"shape": vars(shape), "one_layer_db": accuracy_of_one_layer(shape), "db": db, "gemm_tflops": gemms(shape)}
    # In a row, as layers of a model: the host has the launches of a step ready when the step before ends.
    times = harness.interleaved({mode: runner.step for mode, runner in modes.items()}, rounds=5, repeat=24)
    result |= {"rounds": times, "ms": harness.medians(times)}
    return result | {"speedup": {mode: speedup(result, mode, "bf16") for mode in times}}


# --- Packed experts --------------------------------------------------------------------------------------------


def pack(experts: Experts, name: str) -> PackedExperts:
    """The experts by a scheme; static inputs have the scale of normal numbers up to 6."""
    scheme = get_scheme(name)
    layers = []
    for matrices in (experts.gate_up_proj, experts.down_proj):
        layer = PackedGroupedLinear(matrices, scheme)
        for e, w in enumerate(matrices.detach()):
            q = quantize(w, scheme.weight)
            layer.weight[e] = q.data
            layer.weight_scale[e] = scheme.stored_scale(q)  # one for the matrix is expanded to its rows
        if layer.input_scale is not None:
            layer.input_scale.fill_(6 / 448)
        layers.append(layer)
    return PackedExperts(*layers)


def measure_packed(shape: Shape) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        experts = Experts(shape.experts, shape.width, shape.mlp_width).bfloat16().requires_grad_(False)
    ways: dict[str, Callable[..., Tensor]] = {"bf16": experts} | {name: pack(experts, name) for name in SCHEMES}
    cells = [measure_tokens(shape, ways, tokens, kind) for kind, sizes in TOKENS.items() for tokens in sizes]
    return {"shape": vars(shape), "cells": cells}


@torch.inference_mode()
def measure_tokens(shape: Shape, ways: dict[str, Callable[..., Tensor]], tokens: int, kind: str) -> dict[str, Any]:
    with torch.device(DEVICE):
        x = torch.randn(tokens, shape.width, dtype=torch.bfloat16)
        weight, index = torch.topk(torch.rand(tokens, shape.experts).softmax(-1), shape.top_k, -1)
    steps: dict[str, Callable[[], Tensor]] = {name: partial(way, x, index, weight) for name, way in ways.items()}
    if kind == "decode":
        steps = {name: harness.captured(step) for name, step in steps.items()}
    found = harness.turns("bf16", steps, rounds=15, repeat=10 if tokens <= 512 else 3, least=LEAST_DB)
    return {"tokens": tokens, "kind": kind, "db": found["sqnr"], "ms": found["ms"]}


# --- The kernels of grouped GEMMs ------------------------------------------------------------------------------


class Gemm(NamedTuple):
    """A product of eight-bit operands: in BF16, and by the kernels, for a way to accumulate."""

    wide: Callable[[], Tensor]
    cutlass: Callable[..., Tensor] | None  # None if the kernel does not take the formats
    ours: Callable[..., Tensor]

    def ways(self, name: str) -> dict[str, Callable[[], Tensor]]:
        found: dict[str, Callable[[], Tensor]] = {}
        for how, fast in ACCUMULATION.items():
            if self.cutlass is not None:
                found[f"{name}, cutlass, {how}"] = partial(self.cutlass, fast=fast)
            found[f"{name}, triton, {how}"] = partial(self.ours, fast)
        return found


def measure_kernels(shape: Shape) -> dict[str, Any]:
    p = Products(shape)
    e5m2 = quantize(p.dy, Cast("e5m2", scale="pow2"))
    gemms = {
        "y": of_rows(p.x_q.data, p.w_q.data, p.offsets),
        "dx": of_rows(p.dy_q.data, p.wt_q.data, p.offsets),
        "dw": of_columns(p.dy_t, p.x_t, p.offsets),
        "dx of e5m2": of_rows(e5m2.data, p.wt_q.data, p.offsets),
        "dw of e5m2": of_columns(transpose(e5m2.data), p.x_t, p.offsets),
    }
    with compile_only():  # in several threads
        for gemm in gemms.values():
            for fast in ACCUMULATION.values():
                gemm.ours(fast)
    ways, db = {f"{name}, bf16": product for name, product in p.in_bf16().items()}, {}
    for name, gemm in gemms.items():
        wide = gemm.wide()
        for way, product in gemm.ways(name).items():
            (db[way],), ways[way] = harness.each_decibels([wide], [product()], 20), product
    return {"shape": vars(shape), "db": db, "gemm_tflops": p.tflops(ways)}


def of_rows(a: Tensor, b: Tensor, offsets: Tensor) -> Gemm:
    """a [M, K] with b [E, N, K]."""
    from octavo.ops.kernels import grouped_gemm as ours  # Triton is not everywhere that this file is read

    scale_a, scale_b = (torch.ones_like(t[..., :1], dtype=torch.float32) for t in (a, b))
    return Gemm(
        lambda: F.grouped_mm(a.to(BF16), b.to(BF16).transpose(1, 2), offs=offsets),
        partial(cutlass.grouped_mm, a, scale_a, b, scale_b, offsets) if a.dtype == b.dtype else None,
        partial(ours.grouped_mm, Operands(a, b, scale_a, scale_b, ROW, ROW), offsets, BF16),
    )


def of_columns(a: Tensor, b: Tensor, offsets: Tensor) -> Gemm:
    """a [N, M] with b [K, M]."""
    from octavo.ops.kernels import grouped_gemm as ours

    scale = torch.ones(len(offsets), len(a), 1, device=a.device)
    return Gemm(
        lambda: F.grouped_mm(a.to(BF16), b.to(BF16).t(), offs=offsets),
        partial(cutlass.grouped_mm_dw, a, scale, b, offsets) if a.dtype == b.dtype else None,
        partial(ours.grouped_mm_dw, Operands(a, b, scale, scale, ROW, ROW), offsets, BF16),
    )


@benchmark(only=("layer", "packed", "kernels"))
def main(options: Options) -> Results:
    result = {}
    for name, shape in SHAPES.items() if options.only in (None, "layer") else ():
        result[name] = measure(shape)
        yield "gpu_moe", result
    if options.only in (None, "packed"):
        yield "gpu_packed_experts", {"shapes": {name: measure_packed(shape) for name, shape in SHAPES.items()}}
    if options.only == "kernels" or (options.only is None and DEVICE == "cuda"):
        yield "gpu_grouped_rows", {"shapes": {name: measure_kernels(shape) for name, shape in SHAPES.items()}}
