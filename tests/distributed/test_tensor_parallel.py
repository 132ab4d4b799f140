"""Column- and row-parallel layers of two ranks compute what one rank computes, and send eight bits."""

import tempfile
from dataclasses import replace
from functools import partial

import pytest
import tensor_parallel_examples as examples
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from metrics import distance, sqnr
from operation_counts import Traffic, saved_tensors
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import octavo
from octavo.distributed import ColumnParallel, NormParallel, RowParallel, fp8_all_gather, tensor_parallel
from octavo.distributed.ranks import Ranks, Shards, quantize_shards
from octavo.models import GPT2, GPT2Config, Llama, LlamaConfig
from octavo.nn import SwiGLU
from octavo.nn.parallel_weights import ParallelLinear
from octavo.ops import quantize
from octavo.recipe import GEMMS, rowwise
from octavo.train.config import ActivationCheckpointing, Config
from octavo.train.model import prepare_blocks

# y of a row-parallel layer is a sum over the ranks, so its order differs; the bytes of its operands do not.
CLOSE = 1e-6
CHECKPOINTED = Config(activation_checkpointing=ActivationCheckpointing("full"))


def orders(rank):
    """In both orders of conversion and cutting two layers compute what one rank computes, and send eight bits."""
    for convert_first in (True, False):
        one, model = examples.two_layers(), examples.two_layers()
        octavo.convert(one)
        if convert_first:
            octavo.convert(model)
        parallelize_module(model, examples.mesh_of(2), {"0": ColumnParallel(), "2": RowParallel()})
        if not convert_first:
            octavo.convert(model)
        x = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(1)).requires_grad_()
        own = x.detach().chunk(2, dim=1)[rank].clone().requires_grad_()
        assert torch.equal(model[0](own), one[0](x).chunk(2, dim=2)[rank])
        y = one(x)
        y.square().sum().backward()
        with Traffic() as sent:
            y_own = model(own)
            forward = [name for name, _ in sent.sent]
            y_own.square().sum().backward()
        # PyTorch keeps the memory of an exchange whose result nobody waits for.
        assert torch._C._distributed_c10d._get_work_registry_size() == 0
        pairs = {"y": (y_own, y.chunk(2, dim=1)[rank]), "dx": (own.grad, x.grad.chunk(2, dim=1)[rank])}
        pairs |= {name: (examples.whole(p.grad), one.get_parameter(name).grad) for name, p in model.named_parameters()}
        differences = {name: distance(*pair) for name, pair in pairs.items()}
        assert max(differences.values()) < CLOSE, differences
        tokens = 3 * 32  # of this rank
        ratio = sum(sent.of("all_gather")) / (2 * tokens * (96 + 96 + 96))  # of x, x again, dy
        assert 0.5 < ratio <= 0.53  # of what BF16 would send: bytes, and a scale for each row of 96
        # x; the floors of one weight; the row scales of the other, and of its input; y
        assert sorted(forward) == ["all_gather_into_tensor_coalesced", *["all_reduce"] * 3, "reduce_scatter_tensor"]


def parts(rank):
    """Bytes and scales of the parts of two weights, in one exchange, are those of the whole weights."""
    ranks = Ranks.of(examples.mesh_of(2), sequence=True)
    w = torch.randn(2, 32, 48, generator=torch.Generator().manual_seed(1))
    w[0, 20], w[1, 3], w[1, 7, 5] = 0, 1e-9, torch.nan
    cast = octavo.recipe.rowwise().w
    rows, columns = w[0].chunk(2)[rank], w[1].chunk(2, dim=1)[rank].contiguous()
    with Traffic() as sent:
        found = quantize_shards([Shards([rows], cast, cut_rows=False), Shards([columns], cast, cut_rows=True)], ranks)
    first, second = (quantize(t, cast) for t in w)
    exact = [(first.data.chunk(2)[rank], first.scale.chunk(2)[rank]), (second.data.chunk(2, dim=1)[rank], second.scale)]
    for q, (data, scale) in zip(found, exact, strict=True):
        assert torch.equal(q.data.float().nan_to_num(9e9), data.float().nan_to_num(9e9))
        assert torch.equal(q.scale.nan_to_num(7), scale.nan_to_num(7))
    assert sent.sent == [("all_reduce", 4 * (1 + 32))]  # a floor, and a scale for each row


def tp_plan():
    model = nn.Sequential(split(nn.Linear(8, 8), ColumnParallel()))
    model[0].forward = model[0].forward  # transformers replaces it too
    octavo.convert(model)


def split(layer, style, *sizes):
    return parallelize_module(layer, examples.mesh_of(*(sizes or (2,))), style)


REFUSED = [
    (lambda: split(nn.Linear(8, 7), ColumnParallel()), "share Linear.*: its outputs must be a multiple of 2"),
    (lambda: split(nn.Linear(7, 8), RowParallel()), "share Linear.*: its inputs must be a multiple of 2"),
    (lambda: split(nn.Embedding(8, 8), RowParallel()), "RowParallel takes an nn.Linear, converted or not, got Emb"),
    (lambda: split(split(nn.Linear(8, 8), ColumnParallel()), ColumnParallel()), "takes an nn.Linear.*got ParallelL"),
    (lambda: split(nn.Linear(8, 8), ColumnParallel(), 2, 1), "takes a mesh of one dimension"),
    (lambda: split(nn.Linear(8, 8), RowParallel())(torch.ones(1, 3, 4)), "must be a multiple of 2, .*, got 3: pad it"),
    (lambda: split(octavo.Linear(8, 8), ColwiseParallel())(torch.ones(3, 8)), "PyTorch's styles of tensor parallelism"),
    (tp_plan, "tp_plan cut it: open the model without tp_plan"),
]


def refusals(rank):
    for call, words in REFUSED:
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=words):
            call()


def restored(rank):
    model = examples.two_layers()
    parallelize_module(model, examples.mesh_of(2), {"0": ColumnParallel(), "2": RowParallel()})
    octavo.convert(model)
    assert octavo.restore(model) == ["0", "2"]
    assert model(torch.ones(2, 96)).shape == (2, 96)
    assert all(type(layer) is ParallelLinear and isinstance(layer.weight, DTensor) for layer in (model[0], model[2]))
    assert all(p.placements == (Replicate(),) for p in split(nn.LayerNorm(96), NormParallel()).parameters())


def rotations(rank):
    """Each rank rotates its own part, which cancels as the whole does: the SQNR is that of one rank."""
    plain, one, two = examples.two_layers(), examples.two_layers(), examples.two_layers()
    for model in (one, two):
        octavo.convert(model, replace(rowwise(), name="rotated", rotate=GEMMS))
    parallelize_module(two, examples.mesh_of(2), {"0": ColumnParallel(), "2": RowParallel()})
    x, dy = (torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    found = []
    for model in (plain, one, two):
        x_own, dy_own = (t.chunk(2, dim=1)[rank] if model is two else t for t in (x, dy))
        x_own = x_own.clone().requires_grad_()
        y = model(x_own)
        y.backward(dy_own)
        by_rows = [t if model is two else t.chunk(2, dim=1)[rank] for t in (y.detach(), x_own.grad)]
        found.append([*by_rows, *(examples.whole(p.grad) for p in model.parameters())])
    for exact, a, b in zip(*found, strict=True):
        assert sqnr(exact, b) > min(sqnr(exact, a), 100) - 1


def tensor_scales(rank):
    """Scales of whole tensors are those of one rank, bit for bit, and so is all that is not summed over the ranks.

    The first step has no history: its scales too are those of the largest amax of both ranks.
    """
    x, dy = (torch.randn(64, 96, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    dy[:, 7] *= 100  # the largest gradient, and the only ones of an input, come from one rank's part
    x[:, 60] *= 100
    for recipe, step in (("tensorwise", 0), ("delayed", 0), ("delayed", 1)):
        one, two = examples.two_layers(), examples.two_layers()
        for model in (one, two):
            octavo.convert(model, recipe)
        styles = {"0": ColumnParallel(sequence=False), "2": RowParallel(sequence=False)}
        parallelize_module(two, examples.mesh_of(2), styles)
        for _ in range(step + 1):
            for model in (one, two):
                model.zero_grad()
                model(x).backward(dy)
                octavo.scales.update_scales(model)
        here, there = octavo.scales.scale_state(two), octavo.scales.scale_state(one)
        assert all(torch.equal(here[name], there[name]) for name in there)
        assert torch.equal(two[0](x), one[0](x).chunk(2, dim=1)[rank])
        pairs = [(examples.whole(two.get_parameter(name).grad), p.grad) for name, p in one.named_parameters()]
        assert all(torch.equal(*pair) for pair in pairs)
        assert distance(two(x), one(x)) < CLOSE


def recomputed(rank):
    """Ranks that compute gate and up again in the backward pass have the same bits."""
    mlp, x = SwiGLU(96, 128), torch.randn(2, 8, 96, generator=torch.Generator().manual_seed(rank))
    octavo.convert(mlp)
    styles = {"gate_proj": ColumnParallel(), "up_proj": ColumnParallel(), "down_proj": RowParallel()}
    parallelize_module(mlp, examples.mesh_of(2), styles)
    found = []
    for mlp.recompute in (False, True):
        mlp.zero_grad()
        given = x.clone().requires_grad_()
        mlp(given).square().sum().backward()
        found.append([given.grad, *(examples.whole(p.grad) for p in mlp.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("check", [orders, parts, recomputed, refusals, restored, rotations, tensor_scales])
def test_layers_of_two_ranks(check):
    run_ranks(2, check)


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
BY_TENSOR = [("llama", "tensorwise", True, True), ("gpt2", "delayed", False, True)]
BY_TENSOR += [("LlamaForCausalLM", "tensorwise", True, False), ("llama", "delayed", True, False)]
# Every rank has scales of its own in these recipes, or, in Qwen3, bytes that the norm of the heads may move.
OTHERS = [("llama", recipe, True, True) for recipe in ("rowwise_dw_bf16", "blockwise")]
OTHERS += [("Qwen3ForCausalLM", "rowwise", True, True)]


def differences(rank, cases):
    """Of the first logits, the first gradients, and the parameters after three steps; None where those are wrong."""
    mesh, results = examples.mesh_of(2), []
    for kind, recipe, sequence, first in cases:
        one = examples.converted(kind, recipe)
        shared = partial(tensor_parallel, mesh=mesh, sequence=sequence)
        model = examples.converted(kind, recipe, shared, first=first)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert model.state_dict().keys() == one.state_dict().keys()
        (logits, gradients), (expected, expected_gradients) = examples.train(model), examples.train(one)
        of_gradients = examples.distance_of_all(gradients, expected_gradients)
        of_parameters = examples.distance_of_all(examples.parameters_of(model), examples.parameters_of(one))
        results.append((distance(logits, expected), of_gradients, of_parameters))
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cases", "logits", "gradients", "parameters"),
    [
        (UNCONVERTED, 1e-6, 1e-6, 1e-4),
        # Bytes and scales are those of one rank, but for gradients at the border of two codes.
        (ROWWISE[:3], 1e-6, 2e-3, 1e-3),
        (ROWWISE[3:], 1e-6, 2e-3, 1e-3),
        (BY_TENSOR, 1e-6, 2e-3, 1e-3),
        (OTHERS, 0.05, 0.2, 0.01),  # within the error of the recipe itself
    ],
    ids=["unconverted", "rowwise ours", "rowwise transformers", "by tensor", "others"],
)
def test_models_differ_within_these_bounds_and_alike_on_both_ranks(cases, logits, gradients, parameters):
    here, there = run_ranks(2, differences, cases)
    assert here == there
    for case, found in zip(cases, here, strict=True):
        assert found[0] < logits, (case, found)
        assert found[1] < gradients, (case, found)
        assert found[2] < parameters, (case, found)


ONE_LAYER = {"vocabulary": 61, "layers": 1, "context": 32}
LLAMA = partial(LlamaConfig, width=64, heads=4, **ONE_LAYER)
REFUSED_MODELS = [
    (lambda: nn.Sequential(nn.Linear(8, 8)), "got Sequential: give its layers the styles .*ColumnParallel"),
    (lambda: Llama(LLAMA(kv_heads=1, mlp_width=96)), "2 ranks cannot share 1 heads of keys and values of a layer"),
    (lambda: Llama(LLAMA(kv_heads=2, mlp_width=97)), "2 ranks cannot share 97 columns inside the MLP of a layer"),
    (lambda: GPT2(GPT2Config(width=63, heads=3, **ONE_LAYER)), "cannot share 3 heads, 3 heads of keys and values of"),
]


def refused_models(rank):
    """What cannot be cut is refused before anything changes."""
    for make, words in REFUSED_MODELS:
        model = make()
        with pytest.raises(ValueError, match=words):
            tensor_parallel(model, examples.mesh_of(2))
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    with pytest.raises(ValueError, match="takes a mesh of one dimension"):
        tensor_parallel(examples.make_model("llama"), examples.mesh_of(2, 1))
    with pytest.raises(TypeError, match="takes a DeviceMesh"):
        tensor_parallel(examples.make_model("llama"), 2)
    model = examples.make_model("LlamaForCausalLM")
    tensor_parallel(model, examples.mesh_of(2))
    for again in (model, fully_shard(examples.make_model("llama"))):
        with pytest.raises(ValueError, match="is a DTensor already: call tensor_parallel once for a model, and before"):
            tensor_parallel(again, examples.mesh_of(2))
    with pytest.raises(ValueError, match=r"length must be a multiple of 2, the degree .*, got 7: pad it, or choose"):
        model(torch.zeros(2, 7, dtype=torch.int64))


def on_meta(rank):
    """A model that was made, converted and cut on the meta device, then loaded."""
    one = examples.converted("llama", "rowwise")
    with torch.device("meta"):
        model = examples.make_model("llama")
    octavo.convert(model)
    tensor_parallel(model, examples.mesh_of(2))
    model.to_empty(device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        source = one.get_parameter(name)
        part = source.chunk(2, parameter.placements[0].dim)[rank] if parameter.placements[0].is_shard() else source
        parameter.to_local().data.copy_(part)
    tokens, _ = examples.batch()
    assert distance(examples.logits_of(model, tokens), examples.logits_of(one, tokens)) < 1e-6
    assert examples.whole(model.model.norm.weight).shape == (64,)


def in_bf16(rank):
    """BF16 weights lose nothing more: the SQNR of logits and gradients is that of one rank's FP8."""
    results = []
    for recipe, ranks in ((None, 1), ("rowwise", 1), ("rowwise", 2)):
        model = examples.make_model("llama").bfloat16()
        with torch.no_grad():
            for p in model.model.layers.parameters():
                p.copy_(p if p.ndim == 1 else 10 * p)  # so that the layers decide over the stream, as wide ones do
        if recipe is not None:
            octavo.convert(model, recipe)
        if ranks > 1:
            tensor_parallel(model, examples.mesh_of(ranks))
        logits = examples.logits_of(model, examples.batch()[0])
        logits.float().square().mean().backward()
        results.append([examples.whole(logits), *(examples.whole(p.grad) for p in model.parameters())])
    expected, *found = results
    one, two = ([sqnr(*pair) for pair in zip(expected, result, strict=True)] for result in found)
    assert abs(one[0] - two[0]) < 0.3
    assert abs(sum(one) - sum(two)) < 0.3 * len(one)


# ---- Tensor parallelism with FSDP2, activation checkpointing, cached weights, checkpoints and torch.compile


def cut(mesh):
    model = examples.converted("llama", "rowwise")
    tensor_parallel(model, mesh)
    return model


def shard_twice(rank):
    """In two dimensions the parameters after three steps are those of a wide gather, and nearly those of one rank."""
    mesh, results = examples.mesh_of(2, 2), []
    for gathers in (False, True):
        model = cut(mesh["tp"])
        prepare_blocks(model, CHECKPOINTED)
        for unit in (*model.model.layers, model):
            fully_shard(unit, mesh=mesh["dp"])
        if gathers:
            report = fp8_all_gather(model)
            assert len(report.gathered) == 7, str(report)
        examples.train(model)
        results.append(examples.parameters_of(model))
    one = examples.converted("llama", "rowwise")
    examples.train(one)
    wide, gathered = results
    assert all(torch.equal(wide[name], gathered[name]) for name in wide)
    assert examples.distance_of_all(gathered, examples.parameters_of(one)) < 1e-3


def settings(rank):
    """Cached weights and recomputed activations change nothing; one rank reads a checkpoint of two."""
    mesh = examples.mesh_of(2)
    plain, cached, recomputed = (cut(mesh) for _ in range(3))
    prepare_blocks(recomputed, CHECKPOINTED)
    tokens, _ = examples.batch()
    examples.train(plain)
    examples.train(recomputed)
    with octavo.scales.cast_once(cached):
        examples.train(cached)
        with Traffic() as once:
            examples.logits_of(cached, tokens)
        optimizer = torch.optim.SGD(cached.parameters(), lr=0.0)
        for p in cached.parameters():
            p.grad = torch.zeros_like(p)
        with Traffic() as step:
            optimizer.step()
    with Traffic() as every_time:
        examples.logits_of(cached, tokens)
    one = examples.make_model("llama")
    state = one.state_dict()
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)  # that of rank 0
        dcp.save(plain.state_dict(), checkpoint_id=folder[0])
        dcp.load(state, checkpoint_id=folder[0])
        dist.barrier()
    one.load_state_dict(state)
    expected = examples.parameters_of(plain)
    for model in (cached, recomputed, one):
        assert all(torch.equal(t, expected[name]) for name, t in examples.parameters_of(model).items())
    counts = [len(seen.of("all_reduce")) for seen in (once, step, every_time)]
    assert counts == [counts[0], 1, counts[0] + 4]  # a step has one for all weights; q, k, v; o; gate, up; down


def compiled(rank):
    """A compiled layer has the gradients of an eager one, and saves its own rows for the backward pass."""
    tokens, results = examples.batch()[0], []
    for backend in (None, "aot_eager_decomp_partition"):
        model = cut(examples.mesh_of(2))
        (layer,) = model.model.layers
        if backend is not None:
            layer.compile(fullgraph=True, backend=backend)
        examples.logits_of(model, tokens).square().mean().backward()
        results.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    assert all(torch.equal(results[0][name], g) for name, g in results[1].items())
    x = torch.randn(2, 16, 64, requires_grad=True)
    tables = torch.ones(1, 32, 16), torch.zeros(1, 32, 16)
    saved = saved_tensors(lambda: layer(x, None, *tables, None))
    # Own rows of the two norms' outputs, and the input of o: no weight, and no row of the other rank.
    assert sorted(tuple(t.shape) for t in saved if t.element_size() == 1) == [(32, 64), (32, 64), (64, 32)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "check"),
    [(2, refused_models), (2, on_meta), (2, in_bf16), (4, shard_twice), (2, settings), (2, compiled)],
)
def test_a_model_that_ranks_share(world, check):
    run_ranks(world, check)
