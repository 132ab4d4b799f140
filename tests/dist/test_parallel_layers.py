"""Column- and row-parallel layers of two ranks compute what one rank computes, and send eight bits."""

import pytest
import torch
from ranks import run_ranks
from tensor_parallel_examples import Traffic, difference, mesh_of, two_layers, whole
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import octavo
from octavo.dist import ColumnParallel, NormParallel, RowParallel
from octavo.dist.tensor_parallelism.ranks import Ranks
from octavo.dist.tensor_parallelism.weights import Shards, quantize_shards
from octavo.nn.parallel import ParallelLinear
from octavo.ops import quantize

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
