"""Layer norm -> linear -> sigmoid, forward and backward, over tokens M, inputs K, outputs N: the sizes where FP8 pays.

Compiling the modes of a cell takes longer than measuring them. So the cells come in an order that covers the range
first, and the run ends after `--seconds`. The result holds every round, since modes are compared round by round: the
host takes most of the time of a short step, and its speed varies by more than the modes differ.

"ours, only if faster" either converts the layer or leaves it as it is. So it has the rounds of "ours" or of "bf16".

    python -m bench.gpu.layer [--seconds 3600]
"""

import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from bench import record
from bench.gpu.modes import speedup
from bench.gpu.peers import use_torchao
from bench.gpu.timing import interleaved, own_code
from octavo.nn import NormLinear

SIZES = (1024, 2048, 4096, 8192, 16384, 32768)


class Layer(nn.Module):
    def __init__(self, k: int, n: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(k), nn.Linear(k, n, bias=False)
        self.fused = NormLinear(self, "norm", "linear")

    def forward(self, x: Tensor) -> Tensor:
        (y,), _ = self.fused(x)
        return torch.sigmoid(y)


def main() -> None:
    seconds = float(sys.argv[sys.argv.index("--seconds") + 1]) if "--seconds" in sys.argv else 3600
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    for m, k, n in order():
        if time.monotonic() - began > seconds:
            break
        rounds = cell(m, k, n)
        rows.append({"m": m, "k": k, "n": n, "rounds": rounds})
        print(m, k, n, {mode: round(speedup(rows[-1], mode, "bf16"), 2) for mode in rounds}, flush=True)
    print(record.write("gpu_layer", {"cells": rows, "of": len(SIZES) ** 3}))


def order() -> list[tuple[int, int, int]]:
    """All cells: the corners and the middle first, then the others in an order that is random but fixed."""
    cells = [(m, k, n) for m in SIZES for k in SIZES for n in SIZES]
    random.Random(0).shuffle(cells)
    ends = {SIZES[0], SIZES[3], SIZES[-1]}
    return sorted(cells, key=lambda cell: not set(cell) <= ends)


def cell(m: int, k: int, n: int) -> dict[str, list[float]]:
    """Milliseconds of each mode, one a round."""
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    steps = {name: step(convert, x, dy) for name, convert in MODES.items() if name != "torchao" or HAS_TORCHAO}
    share = (1 << 41) // (m * k * n)  # cells with little work get more repetitions
    times = interleaved(steps, rounds=max(5, min(30, share)), repeat=max(2, min(20, share)))
    times["ours, only if faster"] = times["ours" if converts(m, k, n) else "bf16"]
    return {name: [round(ms, 4) for ms in found] for name, found in times.items()}


def converts(m: int, k: int, n: int) -> bool:
    """Whether `only_if_faster` converts the layer for `m` tokens."""
    with torch.device("cuda"):
        layer = Layer(k, n).to(torch.bfloat16)
    octavo.convert(layer, "rowwise", only_if_faster=True, tokens=m)
    return isinstance(layer.linear, octavo.nn.Linear)


def step(convert: Callable[[nn.Module], Any], x: Tensor, dy: Tensor) -> Callable[[], None]:
    """Forward and backward of a compiled layer."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        layer: nn.Module = Layer(x.shape[1], dy.shape[1]).to(torch.bfloat16)
    convert(layer)
    layer.__class__ = own_code(Layer)
    compiled = torch.compile(layer)

    def run() -> None:
        compiled(x).backward(dy)
        layer.zero_grad()
        x.grad = None

    return run


HAS_TORCHAO = bool(record.installed("torchao"))
MODES: dict[str, Callable[[nn.Module], Any]] = {
    "bf16": lambda layer: None,
    "ours": lambda layer: octavo.convert(layer, "rowwise"),
    "torchao": lambda layer: use_torchao(layer, "rowwise"),
}


if __name__ == "__main__":
    main()
