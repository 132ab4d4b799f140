"""Column- and row-parallel layers of two ranks compute what one rank computes, and send eight bits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from metrics import sqnr
from ranks import run_ranks
from tensor_parallel_examples import (
    Traffic,
    batch,
    converted,
    difference,
    difference_of_all,
    logits_of,
    make_model,
    mesh_of,
    parameters_of,
    train,
    two_layers,
    whole,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import octavo
from octavo.distributed import ColumnParallel, NormParallel, RowParallel, fp8_all_gather, tensor_parallel
from octavo.distributed.ranks import Ranks, Shards, quantize_shards
from octavo.models import GPT2, GPT2Config, Llama, LlamaConfig
from octavo.nn.parallel_weights import ParallelLinear
from octavo.ops import quantize
from octavo.recipe import GEMMS, rowwise

# y of a row-parallel layer is a sum over the ranks, so its order differs; the bytes of its operands do not.
CLOSE = 1e-6


def run_orders(rank):
    """For both orders of conversion and cutting: whether y of the first layer is equal, and the other differences."""
    mesh, results = mesh_of(2), []
    for convert_first in (True, False):
        one, model = two_layers(), two_layers()
        octavo.convert(one)
        if convert_first:
            octavo.convert(model)
        parallelize_module(model, mesh, {"0": ColumnParallel(), "2": RowParallel()})
        if not convert_first:
            octavo.convert(model)
        x = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(1)).requires_grad_()
        own = x.detach().chunk(2, dim=1)[rank].clone().requires_grad_()
        first = torch.equal(model[0](own), one[0](x).chunk(2, dim=2)[rank])
        y = one(x)
        y.square().sum().backward()
        with Traffic() as sent:
            y_own = model(own)
            forward = [name for name, _ in sent.sent]
            y_own.square().sum().backward()
        # PyTorch keeps the memory of an exchange whose result nobody waits for.
        assert torch._C._distributed_c10d._get_work_registry_size() == 0
        pairs = {"y": (y_own, y.chunk(2, dim=1)[rank]), "dx": (own.grad, x.grad.chunk(2, dim=1)[rank])}
        pairs |= {name: (whole(p.grad), one.get_parameter(name).grad) for name, p in model.named_parameters()}
        tokens = 3 * 32  # of this rank
        ratio = sent.bytes_of("all_gather") / (2 * tokens * (96 + 96 + 96))  # of x, x again, dy
        results.append((first, {name: difference(*pair) for name, pair in pairs.items()}, ratio, forward))
    return results


def test_two_orders_and_what_is_sent():
    for first, differences, ratio, forward in [order for rank in run_ranks(2, run_orders) for order in rank]:
        assert first
        assert max(differences.values()) < CLOSE, differences
        assert 0.5 < ratio <= 0.53  # of what BF16 would send: bytes, and a scale for each row of 96
        # x; the floors of one weight; the row scales of the other, and of its input; y
        assert sorted(forward) == [
            "all_gather_into_tensor_coalesced", "all_reduce", "all_reduce", "all_reduce", "reduce_scatter_tensor",
        ]  # fmt: skip


def quantize_parts(rank):
    """Whether bytes and scales of the parts of two weights, in one exchange, are those of the whole weights."""
    ranks = Ranks.of(mesh_of(2), sequence=True)
    w = torch.randn(2, 32, 48, generator=torch.Generator().manual_seed(1))
    w[0, 20], w[1, 3], w[1, 7, 5] = 0, 1e-9, torch.nan
    cast = octavo.recipe.rowwise().w
    rows, columns = w[0].chunk(2)[rank], w[1].chunk(2, dim=1)[rank].contiguous()
    with Traffic() as sent:
        parts = quantize_shards([Shards([rows], cast, cut_rows=False), Shards([columns], cast, cut_rows=True)], ranks)
    wholes = [quantize(t, cast) for t in w]
    expected = [
        (wholes[0].data.chunk(2)[rank], wholes[0].scale.chunk(2)[rank]),
        (wholes[1].data.chunk(2, dim=1)[rank], wholes[1].scale),
    ]
    same = [
        torch.equal(q.data.float().nan_to_num(9e9), data.float().nan_to_num(9e9))
        and torch.equal(q.scale.nan_to_num(7), scale.nan_to_num(7))
        for q, (data, scale) in zip(parts, expected, strict=True)
    ]
    return same, sent.sent


def test_weights_have_the_bytes_and_scales_of_one_rank():
    for same, sent in run_ranks(2, quantize_parts):
        assert same == [True, True]
        assert sent == [("all_reduce", 4 * (1 + 32))]  # a floor, and a scale for each row


def refuse(rank):
    mesh, messages = mesh_of(2), []

    def refused(call):
        with pytest.raises((ValueError, TypeError, NotImplementedError)) as error:
            call()
        messages.append(str(error.value))

    refused(lambda: parallelize_module(nn.Linear(8, 7), mesh, ColumnParallel()))
    refused(lambda: parallelize_module(nn.Linear(7, 8), mesh, RowParallel()))
    refused(lambda: parallelize_module(nn.Embedding(8, 8), mesh, RowParallel()))
    layer = parallelize_module(nn.Linear(8, 8), mesh, ColumnParallel())
    refused(lambda: parallelize_module(layer, mesh, ColumnParallel()))
    refused(lambda: parallelize_module(nn.Linear(8, 8), mesh_of(2, 1), ColumnParallel()))
    refused(lambda: parallelize_module(nn.Linear(8, 8), mesh, RowParallel())(torch.ones(1, 3, 4)))
    theirs = nn.Sequential(nn.Linear(8, 8))
    octavo.convert(theirs)
    refused(lambda: parallelize_module(theirs, mesh, {"0": ColwiseParallel()})(torch.ones(3, 8)))
    return messages


def test_what_cannot_be_cut_is_refused():
    parts = [
        "2 ranks cannot share Linear(in_features=8, out_features=7, bias=True): its outputs must be a multiple of 2",
        "2 ranks cannot share Linear(in_features=7, out_features=8, bias=True): its inputs must be a multiple of 2",
        "RowParallel takes an nn.Linear, converted or not, got Embedding(8, 8)",
        "ColumnParallel takes an nn.Linear, converted or not, got ParallelLinear",
        "tensor parallelism takes a mesh of one dimension",
        "its length must be a multiple of 2, got 3",
        "PyTorch's styles of tensor parallelism",
    ]
    for messages in run_ranks(2, refuse):
        for part, message in zip(parts, messages, strict=True):
            assert part in message


def convert_and_restore(rank):
    model = two_layers()
    parallelize_module(model, mesh_of(2), {"0": ColumnParallel(), "2": RowParallel()})
    octavo.convert(model)
    restored = octavo.restore(model)
    y = model(torch.ones(2, 96))
    kinds = [type(layer) is ParallelLinear and isinstance(layer.weight, DTensor) for layer in (model[0], model[2])]
    norm = nn.LayerNorm(96)
    parallelize_module(norm, mesh_of(2), NormParallel())
    return restored, kinds, list(y.shape), [str(p.placements) for p in norm.parameters()]


def test_restored_layers_are_still_parallel():
    replicated = ["(Replicate(),)"] * 2
    assert run_ranks(2, convert_and_restore) == [(["0", "2"], [True, True], [2, 96], replicated)] * 2


# ---- Layers of two ranks with a recipe that rotates: each rank rotates its own part, which cancels as the whole doe


def rotated(rank):
    """The SQNR of y, dx and the gradients in dB against the layers in float32: of one rank, and of two."""
    plain, one, two = two_layers(), two_layers(), two_layers()
    for model in (one, two):
        octavo.convert(model, replace(rowwise(), name="rotated", rotate=GEMMS))
    parallelize_module(two, mesh_of(2), {"0": ColumnParallel(), "2": RowParallel()})
    x, dy = (torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    found = []
    for model in (plain, one, two):
        x_own, dy_own = (t.chunk(2, dim=1)[rank] if model is two else t for t in (x, dy))
        x_own = x_own.clone().requires_grad_()
        y = model(x_own)
        y.backward(dy_own)
        by_rows = [t if model is two else t.chunk(2, dim=1)[rank] for t in (y.detach(), x_own.grad)]
        found.append([*by_rows, *(whole(p.grad) for p in model.parameters())])
    return [[sqnr(exact, actual) for exact, actual in zip(found[0], each, strict=True)] for each in found[1:]]


def test_rotated_layers_of_two_ranks():
    for one, two in run_ranks(2, rotated):
        assert all(b > min(a, 100) - 1 for a, b in zip(one, two, strict=True)), (one, two)


# ---- A model that two ranks share computes what one rank computes, before and after conversion, and trains alike


# kind, recipe, whether each rank has a part of the sequence, whether the model is converted first
ROWWISE = [
    ("llama", "rowwise", True, True),
    ("llama", "rowwise", False, False),
    ("gpt2", "rowwise", True, False),
    ("LlamaForCausalLM", "rowwise", True, True),
    ("MistralForCausalLM", "rowwise", True, False),
    ("Qwen2ForCausalLM", "rowwise", False, True),
]
UNCONVERTED = [("llama", None, True, True), ("gpt2", None, False, True), ("Qwen3ForCausalLM", None, True, True)]
# Every rank has scales of its own in these recipes, or, in Qwen3, bytes that the norm of the heads may move.
OTHERS = [("llama", recipe, True, True) for recipe in ("rowwise_dw_bf16", "delayed", "blockwise")]
OTHERS += [("Qwen3ForCausalLM", "rowwise", True, True), ("LlamaForCausalLM", "tensorwise", True, False)]


def differences(rank, cases):
    """Of the first logits, the first gradients, and the parameters after three steps; None where those are wrong."""
    mesh, results = mesh_of(2), []
    for kind, recipe, sequence, first in cases:
        one = converted(kind, recipe)
        model = converted(kind, recipe, lambda m, cut=sequence: tensor_parallel(m, mesh, sequence=cut), first=first)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert model.state_dict().keys() == one.state_dict().keys()
        (logits, gradients), (expected, expected_gradients) = train(model), train(one)
        results.append(
            (
                difference(logits, expected),
                difference_of_all(gradients, expected_gradients),
                difference_of_all(parameters_of(model), parameters_of(one)),
            )
        )
    return results


def assert_within(cases, logits, gradients, parameters):
    """The differences of each case are below these bounds, and alike on both ranks."""
    here, there = run_ranks(2, differences, cases)
    assert here == there
    for case, found in zip(cases, here, strict=True):
        assert found[0] < logits, (case, found)
        assert found[1] < gradients, (case, found)
        assert found[2] < parameters, (case, found)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [ROWWISE[:3], ROWWISE[3:]], ids=["ours", "transformers"])
def test_rowwise(cases):
    """Bytes and scales are those of one rank, but for gradients at the border of two codes."""
    assert_within(cases, logits=1e-6, gradients=2e-3, parameters=1e-3)


@pytest.mark.slow
def test_a_model_that_is_not_converted():
    assert_within(UNCONVERTED, logits=1e-6, gradients=1e-6, parameters=1e-4)


@pytest.mark.slow
def test_recipes_that_quantize_parts_by_themselves():
    """Within the error of the recipe itself."""
    assert_within(OTHERS, logits=0.05, gradients=0.2, parameters=0.01)


def refuse_models(rank):
    mesh, messages = mesh_of(2), []

    def refused(model, mesh=mesh):
        before = parameters_of(model) if not any(isinstance(p, DTensor) for p in model.parameters()) else None
        with pytest.raises(ValueError, match=r".") as error:
            tensor_parallel(model, mesh)
        assert before is None or not any(isinstance(p, DTensor) for p in model.parameters())
        messages.append(str(error.value))

    sizes = {"vocabulary": 61, "layers": 1, "context": 32}
    refused(nn.Sequential(nn.Linear(8, 8)))
    refused(Llama(LlamaConfig(width=64, heads=4, kv_heads=1, mlp_width=96, **sizes)))
    refused(Llama(LlamaConfig(width=64, heads=4, kv_heads=2, mlp_width=97, **sizes)))
    refused(GPT2(GPT2Config(width=63, heads=3, **sizes)))
    refused(make_model("llama"), mesh_of(2, 1))
    model = make_model("LlamaForCausalLM")
    tensor_parallel(model, mesh)
    refused(model)
    refused(fully_shard(make_model("llama")))
    with pytest.raises(TypeError, match="takes a DeviceMesh"):
        tensor_parallel(make_model("llama"), 2)
    with pytest.raises(ValueError, match="length of a sequence must be a multiple of 2") as error:
        model(torch.zeros(2, 7, dtype=torch.int64))
    return [*messages, str(error.value)]


@pytest.mark.slow
def test_what_cannot_be_cut_is_refused_before_anything_changes():
    expected = [
        "got Sequential: give its layers the styles octavo.distributed.ColumnParallel",
        "2 ranks cannot share 1 heads of keys and values of a layer",
        "2 ranks cannot share 97 columns inside the MLP of a layer",
        "2 ranks cannot share 3 heads, 3 heads of keys and values of a layer",
        "tensor parallelism takes a mesh of one dimension",
        "is a DTensor already: call tensor_parallel once for a model",
        "is a DTensor already: call tensor_parallel once for a model, and before fully_shard",
        "degree of tensor parallelism, got tokens [2, 7]: pad them",
    ]
    for messages in run_ranks(2, refuse_models):
        for part, message in zip(expected, messages, strict=True):
            assert part in message


def on_meta(rank):
    """A model that was made, converted and cut on the meta device, then loaded."""
    one = converted("llama", "rowwise")
    with torch.device("meta"):
        model = make_model("llama")
    octavo.convert(model)
    tensor_parallel(model, mesh_of(2))
    model.to_empty(device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        source = one.get_parameter(name)
        part = source.chunk(2, parameter.placements[0].dim)[rank] if parameter.placements[0].is_shard() else source
        parameter.to_local().data.copy_(part)
    tokens, _ = batch()
    return difference(logits_of(model, tokens), logits_of(one, tokens)), whole(model.model.norm.weight).shape


@pytest.mark.slow
def test_a_model_on_the_meta_device():
    for found, shape in run_ranks(2, on_meta):
        assert found < 1e-6
        assert shape == (64,)


def in_bf16(rank):
    """The SQNR in dB of logits and gradients with BF16 weights, of one rank's FP8 and of that of two ranks."""
    results = []
    for recipe, ranks in ((None, 1), ("rowwise", 1), ("rowwise", 2)):
        model = make_model("llama").bfloat16()
        with torch.no_grad():
            for p in model.model.layers.parameters():
                p.copy_(p if p.ndim == 1 else 10 * p)  # so that the layers decide over the stream, as wide ones do
        if recipe is not None:
            octavo.convert(model, recipe)
        if ranks > 1:
            tensor_parallel(model, mesh_of(ranks))
        logits = logits_of(model, batch()[0])
        logits.float().square().mean().backward()
        results.append([whole(logits), *(whole(p.grad) for p in model.parameters())])
    expected, *found = results
    return [[sqnr(*pair) for pair in zip(expected, result, strict=True)] for result in found]


@pytest.mark.slow
def test_bf16_weights_lose_nothing_more():
    for one, two in run_ranks(2, in_bf16):
        assert abs(one[0] - two[0]) < 0.3
        assert abs(sum(one) - sum(two)) < 0.3 * len(one)


# ---- Tensor parallelism with FSDP2, activation checkpointing, cached weights, checkpoints and torch.compile


def cut(rank, mesh):
    model = converted("llama", "rowwise")
    tensor_parallel(model, mesh)
    return model


def shard_twice(rank):
    """The parameters after three steps: with a wide gather, with an FP8 gather, and of one rank."""
    mesh, results = mesh_of(2, 2), []
    for gathers in (False, True):
        model = cut(rank, mesh["tp"])
        model.checkpoint_activations = True
        for unit in (*model.model.layers, model):
            fully_shard(unit, mesh=mesh["dp"])
        if gathers:
            report = fp8_all_gather(model)
            assert len(report.gathered) == 7, str(report)
        train(model)
        results.append(parameters_of(model))
    one = converted("llama", "rowwise")
    train(one)
    wide, gathered = results
    equal = all(torch.equal(wide[name], gathered[name]) for name in wide)
    return equal, difference_of_all(gathered, parameters_of(one))


@pytest.mark.slow
def test_two_dimensions():
    for equal, distance in run_ranks(4, shard_twice):
        assert equal
        assert distance < 1e-3


def settings(rank, folder):
    """Whether training is the same with each setting; the exchanges of a step; a checkpoint, read by one rank."""
    mesh = mesh_of(2)
    plain, cached, recomputed = (cut(rank, mesh) for _ in range(3))
    recomputed.checkpoint_activations = True
    tokens, _ = batch()
    train(plain)
    train(recomputed)
    with octavo.scales.cast_once(cached):
        train(cached)
        with Traffic() as once:
            logits_of(cached, tokens)
        optimizer = torch.optim.SGD(cached.parameters(), lr=0.0)
        for p in cached.parameters():
            p.grad = torch.zeros_like(p)
        with Traffic() as step:
            optimizer.step()
    with Traffic() as every_time:
        logits_of(cached, tokens)
    expected = parameters_of(plain)
    same = [all(torch.equal(t, expected[n]) for n, t in parameters_of(m).items()) for m in (cached, recomputed)]
    dcp.save(plain.state_dict(), checkpoint_id=folder)
    one = make_model("llama")
    state = one.state_dict()
    dcp.load(state, checkpoint_id=folder)
    one.load_state_dict(state)
    loaded = all(torch.equal(t, expected[name]) for name, t in parameters_of(one).items())
    counts = [sum(name == "all_reduce" for name, _ in seen.sent) for seen in (once, step, every_time)]
    return same, loaded, counts


@pytest.mark.slow
def test_cached_weights_recomputed_activations_and_checkpoints(tmp_path: Path):
    for same, loaded, (once, step, every_time) in run_ranks(2, settings, str(tmp_path / "checkpoint")):
        assert same == [True, True]
        assert loaded
        assert step == 1  # for all weights together
        assert every_time == once + 4  # q, k, v; o; gate, up; down


def compiled(rank):
    """Whether a compiled layer computes what an eager one does, and what it saves for the backward pass."""
    tokens, saved, results = batch()[0], [], []
    for backend in (None, "aot_eager_decomp_partition"):
        model = cut(rank, mesh_of(2))
        (layer,) = model.model.layers
        if backend is not None:
            layer.compile(fullgraph=True, backend=backend)
        logits_of(model, tokens).square().mean().backward()
        results.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
        if backend is not None:
            x = torch.randn(2, 16, 64, requires_grad=True)
            tables = torch.ones(1, 32, 16), torch.zeros(1, 32, 16)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
                layer(x, None, *tables, None)
    eight_bits = [tuple(t.shape) for t in saved if t.element_size() == 1]
    return all(torch.equal(results[0][name], g) for name, g in results[1].items()), eight_bits


@pytest.mark.slow
def test_compiled_layers_save_their_own_rows():
    for equal, eight_bits in run_ranks(2, compiled):
        assert equal
        # Own rows of the two norms' outputs, and the input of o: no weight, and no row of the other rank.
        assert sorted(eight_bits) == [(32, 64), (32, 64), (64, 32)]
