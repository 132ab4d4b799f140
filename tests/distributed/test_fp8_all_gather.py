"""FSDP2 with an FP8 all-gather computes what one rank computes, bit for bit, in every recipe."""

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp_examples import WIDTH, backward, batch, blocks, counted, equal, sharded, train, whole
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import LlamaConfig, LlamaForCausalLM

import octavo
from octavo import models
from octavo.distributed import fp8_all_gather, send_bf16_gradients
from octavo.distributed.fsdp import ShardCache
from octavo.distributed.fsdp_units import sharded_weights
from octavo.nn.parallel_weights import GatheredWeight
from octavo.nn.selection import promote
from octavo.ops import quantize

RECIPES = [name for name in octavo.recipe.PRESETS if name != "bf16"]
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


# ---- What `fp8_all_gather` reports, and what it refuses


def made(recipe: str = "rowwise", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = blocks()
    octavo.convert(model, recipe, **options)
    return model


def refused(model: nn.Module, *inputs: Tensor) -> str:
    """The error of `fp8_all_gather`, or of the forward pass of `inputs`."""
    with pytest.raises(ValueError) as error:  # noqa: PT011, the caller compares the message
        model(*inputs) if inputs else fp8_all_gather(model)
    return str(error.value)


def wide_settings() -> dict[str, dict[str, Any]]:
    """Settings of FSDP2 in which the weights are gathered wide."""
    return {
        "dimension": {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None},
        "offloads": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    }


def hugging_face() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "vocab_size": 40}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_key_value_heads=2))


def reports(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {"train": {}, "reasons": {}}
    for name, options in wide_settings().items():
        model = sharded(made(), **options)
        report = fp8_all_gather(model)
        results["reasons"][name] = (len(report.gathered), *set(report.wide.values()))
        results["train"][name] = equal(train(made()), train(model))

    unit: Any = made()
    for block in unit:
        fully_shard(block.left)
        fully_shard(block.mlp.down_proj)
        fully_shard(block)
    report = fp8_all_gather(unit)
    results["unfused"] = dict(report.unfused)
    results["text"] = str(report)
    unit(batch()).sum().backward()

    model = hugging_face()
    fully_shard(model.model.layers[0].self_attn)
    fully_shard(model.model.layers[0])
    fully_shard(model)
    octavo.convert(model)  # after fully_shard: the layers are no units of their own
    report = fp8_all_gather(model)
    results["attention"] = (dict(report.unfused), len(report.gathered))
    model(input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
    return results


def test_what_is_gathered_wide_and_what_is_not_fused() -> None:
    for results in run_ranks(2, reports):
        assert all(results["train"].values()), results
        assert {name: found[0] for name, found in results["reasons"].items()} == {"dimension": 0, "offloads": 0}
        for name, (_, reason) in results["reasons"].items():
            assert name in reason
        assert results["unfused"] == {
            "0.left": "0.both", "1.left": "1.both", "0.mlp.down_proj": "0.mlp", "1.mlp.down_proj": "1.mlp",
        }  # fmt: skip
        assert "not fused: 0.both, since 0.left is a unit of FSDP's" in results["text"]
        assert results["attention"] == ({"model.layers.0.self_attn": "model.layers.0.qkv"}, 7)


def neighbours(rank: int) -> dict[str, Any]:
    """Two blocks that `fully_shard` takes as a list, which FSDP2 gathers and reduces together."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    pair: Any = made()
    fully_shard([*pair], mp_policy=policy)
    fully_shard(pair, mp_policy=policy)
    report = fp8_all_gather(pair)
    units = {unit.unit for unit in sharded_weights(pair).values()}
    groups = {unit.group for unit in sharded_weights(pair).values()}
    reducing = send_bf16_gradients(pair)
    same = equal(train(made()), train(pair))
    return {"report": report, "units": units, "groups": len(groups), "reducing": reducing, "same": same}


def test_a_list_of_modules_is_one_unit() -> None:
    for found in run_ranks(2, neighbours):
        assert not found["report"].wide
        assert not found["report"].unfused
        assert found["units"] == {"0", "1"}
        assert found["groups"] == found["reducing"] == 1
        assert found["same"]


def errors(rank: int) -> dict[str, str]:
    apart: Any = models.build(models.LlamaConfig(40, layers=1, width=32, heads=2, kv_heads=2, mlp_width=48, context=8))
    octavo.convert(apart)
    fully_shard(apart.model.layers[0].self_attn)  # its block reads q, k and v
    fully_shard(apart)
    ran = sharded(made())
    ran(batch())
    changed, restored, delayed = sharded(made()), sharded(made()), sharded(made("delayed"))
    for model in (changed, restored, delayed):
        fp8_all_gather(model)
    octavo.convert(changed, "tensorwise")
    octavo.restore(restored)
    octavo.convert(delayed, "delayed")  # with new histories
    return {
        "converted again": refused(changed, batch()),
        "new histories": refused(delayed, batch()),
        "restored": refused(restored, batch()),
        "not converted": refused(sharded(blocks())),
        "BF16": refused(sharded(made("bf16"))),
        "not sharded": refused(made()),
        "has run": refused(ran),
        "apart": refused(apart),
    }


def test_a_model_that_is_not_ready_is_refused() -> None:
    for messages in run_ranks(2, errors):
        assert "unit '0' was converted to tensorwise after fp8_all_gather" in messages["converted again"]
        assert "unit '0' was converted to delayed after fp8_all_gather" in messages["new histories"]
        assert "unit '0' was restored after fp8_all_gather" in messages["restored"]
        assert "octavo.convert" in messages["not converted"]
        assert "octavo.convert" in messages["BF16"]
        assert "call fully_shard" in messages["not sharded"]
        assert "before the first forward pass" in messages["has run"]
        assert "model.layers.0.qkv reads the weight of model.layers.0.self_attn.q_proj" in messages["apart"]
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module"):
        fp8_all_gather(Tensor())  # type: ignore[arg-type]


# ---- A promoted layer whose weight FSDP2 gathers in eight bits computes with the numbers that these stand for


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


# ---- Under FSDP2 nothing of a whole weight is kept from the forward to the backward pass, in eager or compiled code


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


def made_saved_weight(recipe: str, *, gather: bool = True, compiled: bool = False) -> tuple[nn.Module, nn.Module]:
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
            _, model = made_saved_weight(recipe, gather=gather)
            results[f"{recipe} {gather}"] = kept(model)
            model(batch()).sum().backward()
    return results


def test_eager_code_keeps_no_weight() -> None:
    for results in run_ranks(2, in_eager_code):
        assert len(results) == 2 * len(RECIPES)
        assert not any(results.values()), results


def in_compiled_code(rank: int) -> dict[str, Any]:
    whole, model = made_saved_weight("rowwise", compiled=True)
    saved = kept(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        return {"kept": saved, "equal": equal(train(whole), train(model))}


@pytest.mark.slow
def test_compiled_blocks_keep_no_weight_and_equal_one_rank() -> None:
    for results in run_ranks(2, in_compiled_code):
        assert results == {"kept": [], "equal": True}


# ---- Loading, writing in place and moving a sharded model: the right bytes afterwards. The state has no trace of th


def made_state(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = blocks(33)
    octavo.convert(model)
    return model


def gathered(model: nn.Module) -> nn.Module:
    model = sharded(model)
    fp8_all_gather(model)
    return model


def other_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of another model, sharded as `model` is."""
    mine, theirs = model.state_dict(), made_state(1).state_dict()
    return {name: distribute_tensor(t, mine[name].device_mesh, mine[name].placements) for name, t in theirs.items()}


def by_dcp(model: nn.Module, folder: Path) -> None:
    dcp.save(other_state(model), checkpoint_id=folder)
    dcp.load(model.state_dict(), checkpoint_id=folder)


def by_dcp_into_parameters(model: nn.Module, folder: Path) -> None:
    dcp.save(other_state(model), checkpoint_id=folder / "parameters")
    dcp.load(dict(model.named_parameters()), checkpoint_id=folder / "parameters")


def in_place(model: nn.Module, folder: Path) -> None:
    with torch.no_grad():
        for p, t in zip(model.parameters(), other_state(model).values(), strict=True):
            p.copy_(t)


class ThroughData(torch.optim.Optimizer):
    """An optimizer that writes through `.data`, which leaves no trace on the parameter."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data._local_tensor.data.copy_(self.param_groups[0]["new"][p]._local_tensor)


def by_optimizer(model: nn.Module, folder: Path) -> None:
    new = dict(zip(model.parameters(), other_state(model).values(), strict=True))
    ThroughData(model.parameters(), {"new": new}).step()


CHANGES: dict[str, Callable[[nn.Module, Path], Any]] = {
    "loaded": lambda model, _: model.load_state_dict(other_state(model)),
    "assigned": lambda model, _: model.load_state_dict(other_state(model), assign=True),
    "DCP": by_dcp,
    "DCP into parameters": by_dcp_into_parameters,
    "in place": in_place,
    "optimizer": by_optimizer,
}


def changed(rank: int, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with torch.no_grad():
        expected = made_state(1)(batch())
    for name, change in CHANGES.items():
        for trained in (False, True):
            model = gathered(made_state())
            if trained:
                train(model, steps=1)
            change(model, folder / str(trained))
            with torch.no_grad():
                results[f"{name}, {trained}"] = torch.equal(model(batch()), expected)
    moved = gathered(made_state())
    moved.to("cpu")
    results["moved"] = equal(train(made_state()), train(moved))
    state = moved.state_dict()
    results["plain"] = all(type(t) is DTensor and type(t._local_tensor) is Tensor for t in state.values())
    if rank == 0:
        moved.state_dict()  # one rank may do so: the next forward pass must not wait for the others
    moved(batch())
    saved = io.BytesIO()
    torch.save(state, saved)
    results["no hooks in a file"] = b"fsdp_pre_all_gather" not in saved.getvalue()
    results["names"] = list(state) == list(made_state().state_dict())
    copied = copy.deepcopy(state)
    results["copied"] = all(torch.equal(copied[k].full_tensor(), state[k].full_tensor()) for k in state)
    return results


@pytest.mark.slow
def test_a_changed_weight_is_quantized_again_and_the_state_is_plain(tmp_path: Path) -> None:
    for results in run_ranks(2, changed, tmp_path):
        assert all(results.values()), results
