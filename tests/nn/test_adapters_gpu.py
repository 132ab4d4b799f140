"""Adapters around frozen layers in the fused passes on CUDA, in BF16: their numbers, compiled, and in place."""

import pytest
import torch
from adapter_oracle import run_adapted, wrap
from fused_oracle import check, exact, linears, swiglu, tokens
from hopper import ONLY_HOPPER
from torch import Tensor

import octavo

pytestmark = [
    pytest.mark.gpu,
    ONLY_HOPPER,
    # the thread that runs backward passes has no context before its first GEMM
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]
T, K, F = 1000, 528, 1104
BLOCKS = pytest.mark.parametrize(("build", "least"), [(linears, 30), (swiglu, 27)])  # dB


def adapted(build) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """A block on the CPU, x and residual."""
    torch.manual_seed(0)
    block = build("rms", K, F, False).to(torch.bfloat16)
    octavo.convert(block)
    return wrap(block), tokens(T, K, torch.bfloat16), tokens(T, K, torch.bfloat16)


@BLOCKS
def test_outputs_and_gradients_are_the_formulas_of_their_bytes(build, least: float) -> None:
    block, x, residual = adapted(build)
    expected = exact(block, x, residual, torch.bfloat16)
    actual = run_adapted(block.cuda(), x.cuda(), residual.cuda())
    check(expected, {name: t.cpu() for name, t in actual.items()}, least)


@BLOCKS
def test_compiled_is_near_eager_and_adds_in_place(build, least: float) -> None:
    torch.compiler.reset()
    block, x, residual = adapted(build)
    block, x, residual = block.cuda(), x.cuda(), residual.cuda()
    eager = run_adapted(block, x, residual)
    block.compile(fullgraph=True)
    check(eager, run_adapted(block, x, residual), least)
    y = torch.ones(64, 48, device="cuda", dtype=torch.bfloat16)
    u, b = torch.ones(64, 16, device="cuda", dtype=torch.bfloat16), torch.ones(48, 16, device="cuda").bfloat16()
    torch.compile(octavo.ops.add_product, fullgraph=True)(y, u, b)
    assert torch.equal(y, torch.full_like(y, 17))
