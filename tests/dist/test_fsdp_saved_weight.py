"""Under FSDP2 nothing of a whole weight is kept from the forward to the backward pass, in eager or compiled code."""

import copy
from typing import Any

import pytest
import torch
from fsdp_examples import WIDTH, batch, blocks, equal, train
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import octavo
from octavo.dist import fp8_all_gather
from octavo.nn.gathered_weight import GatheredWeight

RECIPES = [name for name in octavo.PRESETS if name != "bf16"]
BACKEND = "aot_eager_decomp_partition"  # partitions as Inductor does


def kept(model: nn.Module) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Matrices that autograd saved and that have memory after the forward pass, other than those of the tokens."""
    saved: list[Tensor] = []
    x = batch()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(x)
    matrices = [t for t in saved if not isinstance(t, GatheredWeight) and t.ndim == 2 and min(t.shape) > 1]
    return [
        (tuple(t.shape), t.dtype)
        for t in matrices
        if x.shape[0] not in t.shape and t.untyped_storage().nbytes() and t.shape[0] >= WIDTH
    ]


def made(recipe: str, *, gather: bool = True, compiled: bool = False) -> tuple[nn.Module, nn.Module]:
    """A model on one rank, and the same one sharded."""
    torch.manual_seed(0)
    rows = 256 if recipe == "blockwise" else WIDTH
    whole = blocks(rows, count=1)
    octavo.convert(whole, recipe, skip=("*plain", "*down_proj") if recipe == "blockwise" else ())
    model: Any = copy.deepcopy(whole)
    for block in model:
        if compiled:
            block.compile(fullgraph=True, backend=BACKEND)
        fully_shard(block)
    fully_shard(model)
    if gather:
        fp8_all_gather(model)
    return whole, model


def in_eager_code(rank: int) -> dict[str, Any]:
    results = {}
    for recipe in RECIPES:
        for gather in (False, True):
            _, model = made(recipe, gather=gather)
            results[f"{recipe} {gather}"] = kept(model)
            model(batch()).sum().backward()
    return results


def test_eager_code_keeps_no_weight() -> None:
    for results in run_ranks(2, in_eager_code):
        assert len(results) == 2 * len(RECIPES)
        assert not any(results.values()), results


def in_compiled_code(rank: int) -> dict[str, Any]:
    whole, model = made("rowwise", compiled=True)
    saved = kept(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        return {"kept": saved, "equal": equal(train(whole), train(model))}


@pytest.mark.slow
def test_compiled_blocks_keep_no_weight_and_equal_one_rank() -> None:
    for results in run_ranks(2, in_compiled_code):
        assert results == {"kept": [], "equal": True}
