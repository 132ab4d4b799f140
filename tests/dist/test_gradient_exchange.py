"""Gradients that travel in BF16: the sums are those of FSDP2's reduction in FP32, and of float64."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fsdp_examples import blocks, equal, train, whole
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import octavo
from octavo.dist import fp8_all_gather, send_bf16_gradients

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDE = MixedPrecisionPolicy(reduce_dtype=torch.float32)
ROUNDED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def made(seed: int = 0) -> nn.Sequential:
    """Rows that neither two nor four ranks share evenly."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 37), nn.GELU(), nn.Linear(37, 5))


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    model = copy.deepcopy(model)
    for module in (*(child for child in model.children() if isinstance(child, nn.Linear)), model):
        fully_shard(module, **options)
    return model


def backward(model: nn.Module, rank: int, step: int) -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
    model(x).float().square().mean().backward()


def gradients(model: Any, rank: int, accumulated: bool) -> list[Tensor]:
    """After one micro-batch, or after two, the first without a reduction."""
    for step in range(2) if accumulated else [1]:
        model.set_requires_gradient_sync(not accumulated or step == 1)
        backward(model, rank, step)
    return whole(p.grad for p in model.parameters())


def reduced(rank: int, shape: tuple[int, ...], policy: MixedPrecisionPolicy, accumulated: bool) -> list[Any]:
    """The units, the gradients with FSDP2's own reduction and in BF16, and the bytes that each way gave away."""
    names = ("dp_replicate", "dp_shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    own, ours = (sharded(made(), mesh=mesh, mp_policy=policy) for _ in range(2))
    sent: list[int] = []
    units, exchange = send_bf16_gradients(ours), dist.all_to_all_single

    def counting(output: Tensor, tensor: Tensor, **options: Any) -> Any:
        sent.append(tensor.nbytes)
        return exchange(output, tensor, **options)

    dist.all_to_all_single = counting
    try:
        found = gradients(ours, rank, accumulated)
    finally:
        dist.all_to_all_single = exchange
    return [units, numbers(gradients(own, rank, accumulated)), numbers(found), sent]


def numbers(tensors: list[Tensor]) -> list[np.ndarray]:
    """As arrays, which outlive the process of a rank."""
    return [t.numpy() for t in tensors]


def exact(world: int) -> list[Tensor]:
    """The mean over the ranks, in float64, of the gradients that each computes in BF16."""
    sums: list[Tensor] = []
    for rank in range(world):
        model = made().bfloat16()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 + rank))
        model(x.bfloat16()).float().square().mean().backward()
        grads = [p.grad.double() / world for p in model.parameters()]  # type: ignore[union-attr]
        sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads
    return sums


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=["2 ranks", "4 ranks", "hsdp"])
def test_sums_are_those_of_the_reduction_in_fp32(shape: tuple[int, ...]) -> None:
    world = torch.Size(shape).numel()
    padded = [16 * -(-37 // shape[-1]) + -(-37 // shape[-1]), 37 * -(-5 // shape[-1]) + -(-5 // shape[-1])]
    for units, own, ours, sent in run_ranks(world, reduced, shape, BF16, False):
        assert units == 2  # the model has no parameters of its own
        for a, b, c in zip(ours, own, exact(world), strict=True):
            assert a.dtype == np.float32
            assert np.array_equal(a, b)
            np.testing.assert_allclose(a, c.numpy(), rtol=1e-6, atol=1e-9)
        assert sorted(sent) == sorted(2 * shape[-1] * part for part in padded)  # two bytes an element


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "accumulated"), [(WIDE, False), (BF16, True)], ids=["fp32 weights", "accumulated"])
def test_gradients_in_fp32_are_not_rounded(policy: MixedPrecisionPolicy, accumulated: bool) -> None:
    for units, own, ours, sent in run_ranks(2, reduced, (2,), policy, accumulated):
        assert units == 2
        assert all(map(np.array_equal, own, ours))
        assert not sent
        assert any((grad.view(np.uint32) & 0xFFFF).any() for grad in ours)  # more digits than BF16 has


def trained(rank: int) -> bool:
    """Whether three AdamW steps of a converted model, gathered in eight bits, end alike in both ways."""
    torch.manual_seed(0)
    model = blocks()
    octavo.convert(model)
    results = []
    for ours in (False, True):
        shards = copy.deepcopy(model)
        for module in (*shards, shards):
            fully_shard(module, mp_policy=BF16)
        assert fp8_all_gather(shards).gathered
        if ours:
            assert send_bf16_gradients(shards) == 2
        results.append(train(shards))
    return equal(*results)


@pytest.mark.slow
def test_training_with_the_fp8_all_gather_keeps_its_bits() -> None:
    assert run_ranks(2, trained) == [True, True]


def unchanged(rank: int, policy: MixedPrecisionPolicy) -> tuple[int, int]:
    return send_bf16_gradients(sharded(made(), mp_policy=policy)), dist.get_world_size()


@pytest.mark.slow
@pytest.mark.parametrize(("world", "policy"), [(1, BF16), (2, ROUNDED)], ids=["one rank", "sums in BF16"])
def test_units_that_send_nothing_in_fp32_stay_as_they_are(world: int, policy: MixedPrecisionPolicy) -> None:
    assert run_ranks(world, unchanged, policy) == [(0, world)] * world


def test_a_model_without_units_is_refused() -> None:
    with pytest.raises(ValueError, match="call fully_shard"):
        send_bf16_gradients(made())
    with pytest.raises(TypeError, match="send_bf16_gradients"):
        send_bf16_gradients("model")  # type: ignore[arg-type]
