"""Tensor parallelism with FSDP2, activation checkpointing, cached weights, checkpoints and torch.compile."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ranks import run_ranks
from tensor_parallel_examples import (
    Traffic,
    batch,
    converted,
    difference_of_all,
    logits_of,
    make_model,
    mesh_of,
    parameters_of,
    train,
)
from torch.distributed.fsdp import fully_shard

import octavo
from octavo.dist import fp8_all_gather, tensor_parallel

pytestmark = pytest.mark.slow


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


def test_two_dimensions():
    for equal, difference in run_ranks(4, shard_twice):
        assert equal
        assert difference < 1e-3


def settings(rank, folder):
    """Whether training is the same with each setting; the exchanges of a step; a checkpoint, read by one rank."""
    mesh = mesh_of(2)
    plain, cached, recomputed = (cut(rank, mesh) for _ in range(3))
    recomputed.checkpoint_activations = True
    tokens, _ = batch()
    train(plain)
    train(recomputed)
    with octavo.cast_once(cached):
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


def test_compiled_layers_save_their_own_rows():
    for equal, eight_bits in run_ranks(2, compiled):
        assert equal
        # Own rows of the two norms' outputs, and the input of o: no weight, and no row of the other rank.
        assert sorted(eight_bits) == [(32, 64), (32, 64), (64, 32)]
