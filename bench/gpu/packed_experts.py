"""The experts of a packed folder as `octavo.load` runs them, forward, against BF16's grouped GEMMs. On one GPU.

The routing of a token is drawn at random. Decoding (few tokens) runs as a CUDA graph. The outputs come first, against
BF16; then the ways take turns.

    python -m bench.gpu.packed_experts
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import record
from bench.gpu.harness import DEVICE, Captured, parser_of, show, sized, turns
from bench.gpu.moe import SHAPES, Shape
from octavo.checkpoint.scheme import get_scheme
from octavo.inference.packed_experts import PackedExperts, PackedGroupedLinear
from octavo.nn import Experts
from octavo.ops import quantize

SCHEMES = ("channel", "static", "block", "group128", "mx", "weight")
TOKENS = {"decode": sized([1, 16], [2]), "prefill": sized([512, 8192], [8])}
LEAST_DB = 15.0  # two quantizations in a row leave 23 dB


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


def measure(shape: Shape) -> dict[str, Any]:
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
        steps = {name: Captured(step) for name, step in steps.items()}
    found = turns("bf16", steps, rounds=15, repeat=10 if tokens <= 512 else 3, least=LEAST_DB)
    cell = {"tokens": tokens, "kind": kind, "db": found["sqnr"], "ms": found["ms"]}
    show(shape, cell)
    return cell


def main() -> None:
    parser_of(__doc__).parse_args()
    result = {name: measure(shape) for name, shape in SHAPES.items()}
    print(record.write("gpu_packed_experts", {"shapes": result}))


if __name__ == "__main__":
    main()
