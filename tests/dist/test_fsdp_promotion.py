"""A promoted layer whose weight FSDP2 gathers in eight bits computes with the numbers that these stand for."""

from typing import Any

import torch
from fsdp_examples import backward, blocks, sharded, whole
from ranks import run_ranks

import octavo
from octavo.dist import fp8_all_gather
from octavo.nn.promotion import promote
from octavo.ops import quantize


def gradients(rank: int) -> bool:
    torch.manual_seed(0)
    model: Any = blocks(count=1)
    octavo.convert(model)
    split: Any = sharded(model)
    fp8_all_gather(split)
    backward(split, 0)
    split.zero_grad()
    promote(split[0].plain, "bf16")
    plain = model[0].plain
    with torch.no_grad():
        plain.weight.copy_(quantize(plain.weight, plain.recipe.w).dequantize(torch.float32))
    promote(plain, "bf16")
    losses = backward(split, 1), backward(model, 1)
    ours, theirs = (whole(p.grad for p in m.parameters()) for m in (split, model))
    return torch.equal(*losses) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_gradients_are_those_of_one_rank() -> None:
    assert run_ranks(2, gradients) == [True, True]
