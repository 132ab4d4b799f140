"""Experts that FSDP2 gathers in eight bits, on two GPUs and NCCL: bytes, numbers, training, and Inductor's code."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fsdp_examples import backward, batch, equal, sharded, train
from fsdp_expert_examples import gathered_equal, model_of, stacks_of
from gpu_memory import poison
from hopper import ONLY_HOPPER
from metrics import sqnr
from ranks import run_ranks, use_gpus
from torch import Tensor, nn

from octavo.dist import fp8_all_gather

pytestmark = [
    pytest.mark.gpu,
    ONLY_HOPPER,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

SIZES = {"width": 256, "mlp_width": 128}
ROWS = 256


def step(model: nn.Module, seed: int) -> Tensor:
    poison()
    with torch.autocast("cuda", torch.bfloat16):
        return backward(model, seed, ROWS)


def exact(module: Any, x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """The output [T, K] of unconverted experts in float64, expert by expert."""
    x, weight, w_in, w_out = (t.double() for t in (x, weight, module.gate_up_proj, module.down_proj))
    y = torch.zeros_like(x)
    for e in range(len(w_in)):
        token, slot = (index == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ w_in[e].t()).chunk(2, 1)
        y.index_add_(0, token, weight[token, slot, None] * ((F.silu(gate) * up) @ w_out[e].t()))
    return y


def gathered(whole: nn.Sequential) -> dict[str, Any]:
    """The bytes of the first block's stacks against the reference on the CPU, and its experts' output in dB."""
    model, same, decibels = sharded(whole), [], []

    def compare(module: Any, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        decibels.append(sqnr(exact(whole[0].experts, *inputs), y))

    fp8_all_gather(model)
    model[0].register_forward_pre_hook(lambda block, *_: same.extend(gathered_equal(block, whole[0])))
    model[0].experts.register_forward_hook(compare)
    poison()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        for rows in (ROWS, 0):  # without tokens, the weights are widened
            model(batch(rows=rows, width=SIZES["width"]).cuda())
    return {"bytes": len(same) == 2 * 12 and all(same), "dB": decibels[0]}


def compiled(whole: nn.Sequential, *, gather: bool) -> list[Tensor]:
    torch._dynamo.reset()
    model: Any = sharded(whole)
    if gather:
        fp8_all_gather(model)
    for block in model:
        block.compile(fullgraph=True)
    return train(model, step)


def on_two_gpus(rank: int) -> dict[str, Any]:
    use_gpus(rank)
    found: dict[str, Any] = {}
    for experts in (4, 3):  # two ranks cannot share 3 evenly
        whole = model_of(experts, **SIZES).cuda()
        model = sharded(whole)
        found[f"all {experts}"] = set(fp8_all_gather(model).gathered) == set(stacks_of(whole))
        found[f"trained {experts}"] = equal(train(whole, step), train(model, step))
    return found | gathered(model_of(3, **SIZES).cuda())


def test_two_gpus_compute_what_one_does() -> None:
    for found in run_ranks(2, on_two_gpus):
        assert found.pop("dB") > 22
        assert all(found.values()), found


def compiled_on_two_gpus(rank: int) -> bool:
    use_gpus(rank)
    whole = model_of(3, **SIZES).cuda()
    return equal(compiled(whole, gather=False), compiled(whole, gather=True))


def test_compiled_code_gathers_in_eight_bits_without_a_change() -> None:
    assert run_ranks(2, compiled_on_two_gpus) == [True, True]
