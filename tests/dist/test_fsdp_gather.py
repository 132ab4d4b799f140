"""FSDP2 with an FP8 all-gather computes what one rank computes, bit for bit, in every recipe."""

from typing import Any

import torch
from fsdp_examples import batch, blocks, counted, equal, sharded, train
from ranks import run_ranks
from torch import nn

import octavo
from octavo.dist import fp8_all_gather
from octavo.dist.shard_cache import ShardCache
from octavo.nn.gathered_weight import GatheredWeight
from octavo.ops import quantize

RECIPES = [name for name in octavo.PRESETS if name != "bf16"]
# The others quantize w twice, or rotate it.
GATHERED = ("tensorwise", "rowwise", "rowwise_dw_bf16", "delayed", "blockwise")


def of_recipe(recipe: str) -> tuple[bool, bool]:
    """Whether the weights are gathered in eight bits, and whether training equals that of one rank."""
    torch.manual_seed(0)
    whole = blocks(256, count=1) if recipe == "blockwise" else blocks()
    octavo.convert(whole, recipe, skip=("*plain", "*down_proj") if recipe == "blockwise" else ())
    model = sharded(whole)
    report = fp8_all_gather(model)
    assert bool(report.gathered) != bool(report.wide)
    return bool(report.gathered), equal(train(whole), train(model))


def bytes_of_recipe(recipe: str) -> list[bool]:
    """Whether the gathered bytes and scales of each weight are those of one rank."""
    torch.manual_seed(0)
    whole = blocks(256, count=1) if recipe == "blockwise" else blocks(33, count=1)
    octavo.convert(whole, recipe, skip=("*plain", "*down_proj") if recipe == "blockwise" else ())
    model = sharded(whole)
    fp8_all_gather(model)
    same = []

    def compare(block: nn.Module, *_: Any) -> None:
        for name, layer in block.named_modules():
            if isinstance(layer, octavo.Linear):
                expected = quantize(whole[0].get_submodule(name).weight.detach(), layer.recipe.w)
                w: Any = layer.weight
                assert isinstance(w, GatheredWeight)
                same.append(torch.equal(w.data_bytes.view(torch.uint8), expected.data.view(torch.uint8)))
                same.append(torch.equal(w.scale, expected.scale))
                same.append(w.scale.numel() > 1 or w.scale.data_ptr() % 16 == 0)  # cuBLASLt demands it of one scale

    model[0].register_forward_pre_hook(compare)
    model(batch())
    return same


def all_recipes(rank: int) -> dict[str, Any]:
    return {recipe: of_recipe(recipe) for recipe in RECIPES} | {
        f"bytes of {recipe}": bytes_of_recipe(recipe) for recipe in GATHERED
    }


def test_every_recipe_trains_as_on_one_rank() -> None:
    for results in run_ranks(2, all_recipes):
        assert {recipe for recipe in RECIPES if results[recipe][0]} == set(GATHERED)
        assert all(results[recipe][1] for recipe in RECIPES), results
        for recipe in GATHERED:
            assert results[f"bytes of {recipe}"]
            assert all(results[f"bytes of {recipe}"]), results


def traffic(rank: int) -> dict[str, Any]:
    """The bytes and number of the collectives of a step with two micro-batches, BF16 and FP8."""
    sent = {}
    for kind in ("bf16", "fp8"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 32, bias=False)) for _ in range(2)))
        octavo.convert(model)
        model = sharded(model.bfloat16() if kind == "bf16" else model)
        if kind == "fp8":
            fp8_all_gather(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(4, 1024, dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
        for _ in range(2):
            with counted() as now:
                for _ in range(2):
                    for part in model:
                        part(x).sum().backward()
                optimizer.step()
        sent[kind] = now
    return sent


def test_the_all_gather_sends_half_the_bytes_of_bf16_in_as_many_collectives() -> None:
    for sent in run_ranks(2, traffic):
        assert len(sent["fp8"]["gather"]) == len(sent["bf16"]["gather"]) > 0
        assert sum(sent["fp8"]["gather"]) <= 0.502 * sum(sent["bf16"]["gather"])
        assert not sent["bf16"]["reduce"]
        assert sent["fp8"]["reduce"] == [2 * 4]  # one number a weight, once


def bytes_held(rank: int) -> dict[str, list[int]]:
    """The bytes that a rank holds of its rows after a forward pass, a backward pass and a step, and of all its rows."""
    held, weights = {}, []
    init: Any = ShardCache.__init__
    ShardCache.__init__ = lambda self, model, found: (weights.extend(found), init(self, model, found))[1]  # type: ignore
    for recipe in ("rowwise", "tensorwise", "blockwise"):
        weights.clear()
        torch.manual_seed(0)
        model = blocks(256, count=1)
        octavo.convert(model, recipe, skip=("*plain", "*down_proj"))
        model = sharded(model)
        fp8_all_gather(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for run in (lambda: model(batch()).sum(), lambda: loss.backward(), optimizer.step):  # noqa: B023
            loss = run()
            memory = {id(t): t.numel() for weight in weights for t in (weight.data, weight.sending) if t is not None}
            found.append(sum(memory.values()))
        held[recipe] = [*found, sum(weight.local.numel() for weight in weights)]
    return held


def test_the_bytes_of_a_rank_are_freed_once_they_are_sent() -> None:
    for held in run_ranks(2, bytes_held):
        for recipe in ("rowwise", "tensorwise"):
            forward, backward, stepped, whole = held[recipe]
            assert forward == backward == 0
            assert stepped == whole > 0
        assert len(set(held["blockwise"])) == 1  # those of square blocks stay
