"""Layer norm -> linear -> sigmoid, forward and backward, over tokens M, inputs K, outputs N: the sizes where FP8 pays.

The cells come in an order that covers the range first. The result is written after each cell, so a run may be ended at
any time: cells that bench/results has already, of this machine and commit, are not measured again. All of them take
more than an hour, most of it to compile. The result holds every round, since modes are compared round by round: the
host takes most of the time of a short step, and its speed varies by more than the modes differ.

"ours, only if faster" either converts the layer or leaves it as it is. So it has the rounds of "ours" or of "bf16".

    python -m bench.gpu.layer
"""

import random
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from bench.gpu import harness
from bench.gpu.harness import DEVICE, Options, Results, allocated, benchmark, interleaved, made, sized
from bench.gpu.variants import use_torchao
from octavo.nn import NormLinear

SIZES = sized((1024, 2048, 4096, 8192, 16384, 32768), (128,))


class Layer(nn.Module):
    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(k), nn.Linear(k, n, bias=False)
        self.fused = NormLinear(self, "norm", "linear")

    def forward(self, x: Tensor) -> Tensor:
        (y,), _ = self.fused(x)
        return torch.sigmoid(y)


MODES: dict[str, Callable[[nn.Module], Any]] = {
    "bf16": lambda layer: None,
    "ours": lambda layer: octavo.convert(layer, "rowwise"),
    **({"torchao": lambda layer: use_torchao(layer, "rowwise")} if harness.installed("torchao") else {}),
}


def measured_before() -> list[dict[str, Any]]:
    """The cells of bench/results, if they are of this machine, these versions and this commit."""
    found = harness.result_before("gpu_layer") or {"machine": {}, "cells": []}
    same = {**found["machine"], "measured": ""} == {**harness.facts(), "measured": ""}
    return list(found["cells"]) if same else []


def order() -> list[tuple[int, ...]]:
    """All cells: the corners and the middle first, then the others in an order that is random but fixed."""
    cells = [*product(SIZES, repeat=3)]
    random.Random(0).shuffle(cells)
    return sorted(cells, key=lambda cell: not set(cell) <= {1024, 8192, 32768})


def measure(m: int, k: int, n: int) -> dict[str, list[float]]:
    """Milliseconds of each mode, one a round."""
    x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(m, n, device=DEVICE, dtype=torch.bfloat16)
    steps = {name: step(convert, x, dy) for name, convert in MODES.items()}
    share = (1 << 41) // (m * k * n)  # cells with little work get more repetitions
    times = interleaved(steps, rounds=max(5, min(20, share)), repeat=max(2, min(10, share)))
    times["ours, only if faster"] = times["ours" if converts(m, k, n) else "bf16"]
    return {name: [round(ms, 4) for ms in found] for name, found in times.items()}


def converts(m: int, k: int, n: int) -> bool:
    """Whether `only_if_faster` converts the layer for `m` tokens."""
    with torch.device(DEVICE):
        layer = Layer(k, n).to(torch.bfloat16)
    octavo.convert(layer, "rowwise", only_if_faster=True, tokens=m)
    return isinstance(layer.linear, octavo.nn.Linear)


def step(convert: Callable[[nn.Module], Any], x: Tensor, dy: Tensor) -> harness.Step:
    """Forward and backward of a compiled layer."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        layer = Layer(x.shape[1], dy.shape[1]).to(torch.bfloat16)
    convert(layer)
    passes = harness.Passes(layer, (x,), dy)
    passes.compile()
    return passes.step


@benchmark()
def main(_: Options) -> Results:
    rows = measured_before()
    for m, k, n in order():
        if (m, k, n) in {(row["m"], row["k"], row["n"]) for row in rows}:
            continue
        torch._dynamo.reset()
        allocated()  # frees the layers of the cell before
        if (rounds := made(f"{m} {k} {n}", partial(measure, m, k, n))) is not None:
            rows.append({"m": m, "k": k, "n": n, "rounds": rounds})
            yield "gpu_layer", {"cells": rows, "of": len(SIZES) ** 3}
