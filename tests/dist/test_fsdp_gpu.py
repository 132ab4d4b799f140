"""FSDP2 with an FP8 all-gather on two GPUs and NCCL: the streams, and Inductor's code."""

import copy
from typing import Any

import pytest
import torch
from fsdp_examples import backward, blocks, counted, equal, sharded, train
from ranks import run_ranks, use_gpus
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import octavo
from octavo.dist import fp8_all_gather

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

RECIPES = ("rowwise", "tensorwise", "delayed")


def step(model: nn.Module, seed: int) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16):
        return backward(model, seed, rows=128)


def made(recipe: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = blocks(256, count=6, width=256).cuda()
    octavo.convert(model, recipe)
    return model


def compiled(recipe: str, *, gather: bool) -> nn.Module:
    model: Any = copy.deepcopy(made(recipe))
    for block in model:
        block.compile(fullgraph=True)
        fully_shard(block)
    fully_shard(model)
    if gather:
        fp8_all_gather(model)
    return model


def on_two_gpus(rank: int) -> dict[str, Any]:
    use_gpus(rank)
    results: dict[str, Any] = {}
    for recipe in RECIPES:
        model = sharded(made(recipe))
        report = fp8_all_gather(model)
        with counted() as sent:
            trained = train(model, step)
        results[recipe] = bool(report.gathered) and equal(train(made(recipe), step), trained)
        results[f"{recipe}: all-reduces"] = len(sent["reduce"])
    torch._dynamo.reset()
    results["compiled"] = equal(
        train(compiled("rowwise", gather=False), step), train(compiled("rowwise", gather=True), step)
    )
    return results


def test_two_gpus_compute_what_one_does() -> None:
    for results in run_ranks(2, on_two_gpus):
        assert all(results[recipe] for recipe in RECIPES), results
        assert results["compiled"]
        # One in each forward pass; for delayed, one in the first, and that of `update_scales` after each step.
        assert [results[f"{recipe}: all-reduces"] for recipe in RECIPES] == [3, 3, 4]
