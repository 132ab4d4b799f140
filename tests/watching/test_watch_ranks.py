"""Two ranks record what one rank records of the whole batch, and rank 0 writes it."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fsdp_examples import batch, converted, sharded
from linear_examples import converted_model
from ranks import run_ranks
from tensor_parallel_examples import make_model, mesh_of
from torch import nn
from torch.distributed.fsdp import fully_shard

import octavo
from octavo.distributed import fp8_all_gather, tensor_parallel
from octavo.watching import read_watch

pytestmark = pytest.mark.slow

SHARES = ("saturated", "flushed", "zero_rows", "nonfinite")
TOKENS = torch.randint(61, (2, 32), generator=torch.Generator().manual_seed(1))


def record(model, inputs, loss, folder=None):
    with octavo.watch(model, interval=1, rows=1000, folder=folder) as watch:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss(model, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step()
        return watch.latest().operands, watch.latest().layer_records, watch.layers


def mean_square(model, x):
    return model(x).float().square().mean()


def entropy(model, tokens):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def of_ranks(rank, folder):
    """Records of FSDP2 with and without weights gathered in eight bits, and of tensor parallelism."""
    mine = batch(rows=12).chunk(2)[rank]
    wide = record(sharded(converted()), mine, mean_square, Path(folder))
    model = sharded(converted())
    fp8_all_gather(model)
    gathered = record(model, mine, mean_square)
    model = converted_model(make_model("llama"))
    mesh = mesh_of(1, 2)
    tensor_parallel(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])  # rows of weights are divided by both meshes
    parallel = record(model, TOKENS, entropy)
    dist.barrier()
    return wide, gathered, parallel


@pytest.fixture(scope="module")
def ranks():
    with tempfile.TemporaryDirectory() as folder:
        yield *run_ranks(2, of_ranks, folder), read_watch(Path(folder))


def close(found, expected, names, rel):
    assert np.array_equal(found[["layer", "operand"]], expected[["layer", "operand"]])
    for name in names:
        assert found[name] == pytest.approx(expected[name], rel=rel, abs=0.02 if name in SHARES else 0), name


def test_all_ranks_have_the_same_records(ranks):
    first, second, written = ranks
    for a, b in zip(first, second, strict=True):
        assert all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in zip(a[:2], b[:2], strict=True))
        assert a[2] == b[2]
    assert written.layers == first[0][2]
    assert np.array_equal(np.array(written.operands).view(np.uint8), first[0][0].view(np.uint8))


def test_sharded_weights_are_recorded_as_one_rank_records_them(ranks):
    operands, layers, described = ranks[0][0]
    expected, expected_layers, one = record(converted(), batch(rows=12), mean_square)
    assert described == one
    w, x = (expected["operand"] == operand for operand in (1, 0))
    close(operands[w], expected[w], ("amax", "rms", "scale", "sqnr", "kurtosis", *SHARES), 1e-5)
    close(operands[x], expected[x], ("amax", "rms", "scale", "kurtosis"), 1e-2)
    for name in ("gradient_norm", "gradient_amax", "weight_smallest", "weight_largest"):
        assert layers[name] == pytest.approx(expected_layers[name], rel=0.05), name
    assert layers["weight_norm"] == pytest.approx(expected_layers["weight_norm"], rel=1e-6)


def test_weights_gathered_in_eight_bits_have_no_known_error(ranks):
    wide, gathered = ranks[0][0][0], ranks[0][1][0]
    w = gathered["operand"] == 1
    assert np.isnan(gathered["sqnr"][w]).all()
    assert gathered["amax"][w] == pytest.approx(wide["amax"][w], rel=1e-6)
    assert gathered["rms"][w] == pytest.approx(wide["rms"][w], rel=0.01)
    close(gathered[~w], wide[~w], ("amax", "rms", "sqnr"), 1e-5)


def test_tensor_parallel_layers_are_recorded_as_whole_ones(ranks):
    operands, layers, described = ranks[0][2]
    expected, expected_layers, one = record(converted_model(make_model("llama")), TOKENS, entropy)
    assert [layer.shape for layer in described] == [layer.shape for layer in one]
    forward = expected["operand"] < 2
    close(operands[forward], expected[forward], ("amax", "rms", "scale", "kurtosis", *SHARES), 1e-3)
    close(operands, expected, ("amax", "rms"), 0.1)
    assert np.abs(operands["sqnr"] - expected["sqnr"]).max() < 1
    assert layers["weight_norm"] == pytest.approx(expected_layers["weight_norm"], rel=1e-5)
