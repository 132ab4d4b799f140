"""FSDP2 with an FP8 all-gather computes what one rank computes, bit for bit, in every recipe."""

import copy
import io
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_examples import WIDTH, backward, batch, blocks, converted, equal, gathered, sharded, train, whole
from linear_examples import converted_model, without_chance
from operation_counts import Traffic, saved_tensors
from ranks import run_ranks
from tiny_models import built
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import octavo
from octavo import models
from octavo.distributed import fp8_all_gather, send_bf16_gradients
from octavo.distributed.fsdp import ShardCache
from octavo.distributed.fsdp_units import sharded_weights
from octavo.nn.parallel_weights import GatheredWeight
from octavo.nn.selection import promote
from octavo.ops import quantize, rotate

RECIPES = [name for name in octavo.recipe.PRESETS if name != "bf16"]
SOME = ("rowwise", "delayed", "blockwise", "mxfp8", "mxfp4", "nvfp4")
PAIRS = ("mxfp8", "groupwise", "tensorwise_rotated")  # y and dx read different bytes
WIDE = ("mxfp4", "nvfp4")  # dx is rotated; scales depend on all rows


def compare(block: nn.Module, whole: nn.Module) -> None:
    """The gathered bytes and scales of each weight are those of one rank."""
    for name, layer in block.named_modules():
        if isinstance(layer, octavo.Linear):
            source = whole.get_submodule(name).weight.detach()
            expected = quantize(rotate(source) if layer.recipe.rotate else source, layer.recipe.w)
            w: Any = layer.weight
            assert torch.equal(w.data_bytes.view(torch.uint8), expected.data.view(torch.uint8))
            assert torch.equal(w.scale, expected.scale)
            assert w.scale.numel() > 1 or w.scale.data_ptr() % 16 == 0  # cuBLASLt demands it of one scale


def all_recipes(rank: int, recipes: Sequence[str] = RECIPES) -> None:
    """In these recipes training is that of one rank, and so are the bytes that are gathered."""
    for recipe in recipes:
        rounded = without_chance(recipe) if recipe in WIDE else recipe
        whole, model = converted(rounded), sharded(converted(rounded))
        report = fp8_all_gather(model)
        assert bool(report.gathered) == (not report.wide) == (recipe not in WIDE)
        assert equal(train(whole), train(model)), recipe
    for recipe in filter(lambda name: name not in WIDE, recipes):
        whole = converted(recipe, rows=33, count=1)
        model = sharded(whole)
        fp8_all_gather(model)
        model[0].register_forward_pre_hook(lambda block, _, whole=whole: compare(block, whole[0]))
        model(batch())


def traffic(rank: int) -> None:
    """A step of two micro-batches sends half the bytes of BF16, in as many collectives."""
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
            with Traffic() as now:
                for _ in range(2):
                    for part in model:
                        part(x).sum().backward()
                optimizer.step()
        sent[kind] = now
    gathers = {kind: traffic.of("allgather") for kind, traffic in sent.items()}
    assert len(gathers["fp8"]) == len(gathers["bf16"]) > 0
    assert sum(gathers["fp8"]) <= 0.502 * sum(gathers["bf16"])
    assert not sent["bf16"].of("allreduce")
    assert sent["fp8"].of("allreduce") == [2 * 4]  # one number a weight, once


def traffic_of_pairs(rank: int) -> None:
    """The forward pass sends a byte a number, for y. The backward pass sends the bytes for y and those for dx."""
    torch.manual_seed(0)
    unit = converted_model(nn.Sequential(nn.Linear(1024, 64, bias=False)), "mxfp8")
    fully_shard(unit, reshard_after_forward=True)
    fp8_all_gather(unit)
    with Traffic() as now:
        unit(torch.randn(32, 1024, requires_grad=True)).sum().backward()
    rows, groups = 32 * 1024, 1024  # of this rank, and its scales of a byte
    assert now.of("allgather") == [rows + groups, 2 * (rows + groups)]
    assert now.of("allreduce") == []


def bytes_held(rank: int) -> None:
    """The bytes of a rank's rows are freed once they are sent; those of square blocks stay."""
    weights: list[Any] = []
    init: Any = ShardCache.__init__
    ShardCache.__init__ = lambda self, model, found: (weights.extend(found), init(self, model, found))[1]
    for recipe in ("rowwise", "tensorwise", "blockwise"):
        weights.clear()
        model = sharded(converted(recipe))
        fp8_all_gather(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for run in (lambda: model(batch()).sum(), lambda: loss.backward(), optimizer.step):  # noqa: B023
            loss = run()
            memory = {id(t): t.numel() for weight in weights for t in (weight.data, weight.sending) if t is not None}
            found.append(sum(memory.values()))
        held = sum(weight.local.numel() for weight in weights)
        assert found == ([held] * 3 if recipe == "blockwise" else [0, 0, held])


# ---- What `fp8_all_gather` reports, and what it refuses


# Settings of FSDP2 in which the weights are gathered wide.
WIDE_SETTINGS: dict[str, dict[str, Any]] = {
    "dimension": {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None},
    "offloads": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def reports(rank: int) -> None:
    """What is gathered wide, and what is not fused, is named, and trains all the same."""
    for name, options in WIDE_SETTINGS.items():
        model = sharded(converted(), **options)
        report = fp8_all_gather(model)
        assert not report.gathered
        assert all(name in reason for reason in report.wide.values())
        assert equal(train(converted()), train(model))
    unit: Any = converted()
    for block in unit:
        fully_shard(block.left)
        fully_shard(block.mlp.down_proj)
        fully_shard(block)
    report = fp8_all_gather(unit)
    assert report.unfused == {
        "0.left": "0.both", "1.left": "1.both", "0.mlp.down_proj": "0.mlp", "1.mlp.down_proj": "1.mlp",
    }  # fmt: skip
    assert "not fused: 0.both, since 0.left is a unit of FSDP's" in str(report)
    unit(batch()).sum().backward()
    model = built("llama", num_hidden_layers=1)
    fully_shard(model.model.layers[0].self_attn)
    fully_shard(model.model.layers[0])
    fully_shard(model)
    octavo.convert(model)  # after fully_shard: the layers are no units of their own
    report = fp8_all_gather(model)
    assert report.unfused == {"model.layers.0.self_attn": "model.layers.0.qkv"}
    assert len(report.gathered) == 7
    model(input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()


def neighbours(rank: int) -> None:
    """Two blocks that `fully_shard` takes as a list are one unit, which FSDP2 gathers and reduces together."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    pair: Any = converted()
    fully_shard([*pair], mp_policy=policy)
    fully_shard(pair, mp_policy=policy)
    report = fp8_all_gather(pair)
    assert not report.wide
    assert not report.unfused
    assert {unit.unit for unit in sharded_weights(pair).values()} == {"0", "1"}
    assert len({unit.group for unit in sharded_weights(pair).values()}) == send_bf16_gradients(pair) == 1
    assert equal(train(converted()), train(pair))


def apart() -> nn.Module:
    """A model with a unit whose q, k and v its block reads."""
    model: Any = models.build(models.LlamaConfig(40, layers=1, width=32, heads=2, kv_heads=2, mlp_width=48, context=8))
    octavo.convert(model)
    fully_shard(model.model.layers[0].self_attn)
    fully_shard(model)
    return model


def refusals(rank: int) -> None:
    """A model that is not ready is refused, and one that changed after `fp8_all_gather`, at its next forward pass."""
    ran = sharded(converted())
    ran(batch())
    for model, words in (
        (sharded(blocks()), r"octavo\.convert"),
        (sharded(converted("bf16")), r"octavo\.convert"),
        (converted(), "call fully_shard"),
        (ran, "before the first forward pass"),
        (apart(), r"model\.layers\.0\.qkv reads the weight of model\.layers\.0\.self_attn\.q_proj"),
    ):
        with pytest.raises(ValueError, match=words):
            fp8_all_gather(model)
    for recipe, change, words in (
        ("rowwise", lambda m: octavo.convert(m, "tensorwise"), "converted to tensorwise"),
        ("rowwise", octavo.restore, "restored"),
    ):
        model = sharded(converted(recipe))
        fp8_all_gather(model)
        change(model)
        with pytest.raises(ValueError, match=f"unit '0' was {words} after fp8_all_gather"):
            model(batch())


def promoted(rank: int) -> None:
    """A promoted layer whose weight is gathered in eight bits computes with the numbers that these stand for."""
    model: Any = converted(count=1)
    split: Any = sharded(model)
    fp8_all_gather(split)
    backward(split, 0)
    split.zero_grad()
    promote(split[0].plain, "bf16")
    plain = model[0].plain
    with torch.no_grad():
        plain.weight.copy_(quantize(plain.weight, plain.recipe.w).dequantize(torch.float32))
    promote(plain, "bf16")
    assert torch.equal(backward(split, 1), backward(model, 1))
    assert equal(*(whole(p.grad for p in m.parameters()) for m in (split, model)))


# ---- Under FSDP2 nothing of a whole weight is kept from the forward to the backward pass, in eager or compiled code


BACKEND = "aot_eager_decomp_partition"  # partitions as Inductor does


def kept(model: nn.Module) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Matrices that autograd saved and that have memory after the forward pass, other than those of the tokens."""
    x = batch()
    saved = saved_tensors(lambda: model(x))
    matrices = [t for t in saved if not isinstance(t, GatheredWeight) and t.ndim == 2 and min(t.shape) > 1]
    others = [t for t in matrices if x.shape[0] not in t.shape and t.shape[0] >= WIDTH]
    return [(tuple(t.shape), t.dtype) for t in others if t.untyped_storage().nbytes()]


def of_recipe(recipe: str, *, gather: bool = True, compiled: bool = False) -> nn.Module:
    model: Any = sharded(converted(recipe, count=1))
    if gather:
        fp8_all_gather(model)
    for block in model if compiled else ():
        block.compile(fullgraph=True, backend=BACKEND)
    return model


def in_eager_code(rank: int) -> None:
    """Eager code keeps no weight."""
    for recipe, gather in product(RECIPES, (False, True)):
        model = of_recipe(recipe, gather=gather)
        assert kept(model) == [], (recipe, gather)
        model(batch()).sum().backward()


def in_compiled_code(rank: int) -> None:
    """Compiled blocks keep no weight, and equal one rank."""
    for recipe in ("rowwise", *PAIRS):
        model, whole = of_recipe(recipe, compiled=True), converted(recipe, count=1)
        assert kept(model) == []
        if recipe in PAIRS:  # PyTorch computes the norms there, by other operations in compiled code
            whole[0].compile(fullgraph=True, backend=BACKEND)
        expected = train(whole)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert equal(expected, train(model)), recipe


# ---- Loading, writing in place and moving a sharded model: the right bytes afterwards. The state has no trace of th


def made(seed: int = 0) -> nn.Module:
    return converted(rows=33, seed=seed)


def other_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of another model, sharded as `model` is."""
    mine, theirs = model.state_dict(), made(1).state_dict()
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


def changed(rank: int) -> None:
    """A changed weight is quantized again, and the state has no trace of the hooks."""
    with torch.no_grad():
        expected = made(1)(batch())
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)  # that of rank 0
        for (name, change), trained in product(CHANGES.items(), (False, True)):
            model = gathered(made())
            if trained:
                train(model, steps=1)
            change(model, Path(folder[0]) / str(trained))
            with torch.no_grad():
                assert torch.equal(model(batch()), expected), (name, trained)
        dist.barrier()
    moved = gathered(made())
    moved.to("cpu")
    assert equal(train(made()), train(moved))
    state = moved.state_dict()
    assert all(type(t) is DTensor and type(t._local_tensor) is Tensor for t in state.values())
    if rank == 0:
        moved.state_dict()  # one rank may do so: the next forward pass must not wait for the others
    moved(batch())
    saved = io.BytesIO()
    torch.save(state, saved)
    assert b"fsdp_pre_all_gather" not in saved.getvalue()
    assert list(state) == list(made().state_dict())
    copied = copy.deepcopy(state)
    assert all(torch.equal(copied[k].full_tensor(), state[k].full_tensor()) for k in state)


SOME_RECIPES = partial(all_recipes, recipes=SOME)
QUICK = [SOME_RECIPES, traffic, traffic_of_pairs, bytes_held, reports, neighbours, refusals, promoted, in_eager_code]
SLOW = [pytest.param(check, marks=pytest.mark.slow) for check in (all_recipes, in_compiled_code, changed)]


@pytest.mark.parametrize("check", QUICK + SLOW)
def test_two_ranks(check: Callable[[int], None]) -> None:
    run_ranks(2, check)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module"):
        fp8_all_gather(Tensor())
