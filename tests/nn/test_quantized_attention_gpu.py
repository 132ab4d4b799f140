"""Attention in E4M3 with its gradient on a GPU: against float64, and compiled code against eager code."""

import attention_fp8_oracle as oracle
import pytest
import torch
from gpu_memory import poison
from metrics import sqnr

from octavo.nn.attention_layers import GradientScales, attend_fp8

pytest.importorskip("cudnn")
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # the compiler's own


def both_passes(run, x):
    leaves = [t.detach().clone().requires_grad_() for t in x[:3]]
    y = run(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, x[3])]


def test_against_float64_and_compiled():
    torch.manual_seed(0)
    x = oracle.given(1, 8, 2, 640, 640, device="cuda")
    eager, compiled = GradientScales("cuda"), GradientScales("cuda")
    run = torch.compile(lambda *t: attend_fp8(*t, compiled) * 1, fullgraph=True)
    expected = oracle.exact(*x)
    for _ in range(2):
        poison()
        actual, same = both_passes(lambda *t: attend_fp8(*t, eager), x), both_passes(run, x)
        for exact, one, other in zip(expected, actual, same, strict=True):
            assert sqnr(exact, one) > 16
            assert sqnr(one, other) > 40  # cuDNN's backward pass adds in any order
    assert torch.allclose(eager.amax, compiled.amax, rtol=1e-3)
