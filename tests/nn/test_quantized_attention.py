"""Attention in E4M3 with its gradient: against float64, over passes whose gradients grow, and in compiled code."""

import attention_fp8_oracle as oracle
import pytest
import torch
from metrics import sqnr

from octavo.nn.quantized_attention import DECAY, GradientScales, attend_fp8


def gradients(x, scales, factor=1.0):
    """y, dq, dk and dv."""
    leaves = [t.detach().clone().requires_grad_() for t in x[:3]]
    y = attend_fp8(*leaves, scales)
    return [y.detach(), *torch.autograd.grad(y, leaves, x[3] * factor)]


@pytest.mark.parametrize("factor", [1.0, 2.0**-40, 2.0**40])
def test_the_first_pass(factor):
    torch.manual_seed(0)
    x = oracle.given(2, 4, 2, 64, 64)
    for one, other in zip(oracle.exact(*x[:3], x[3] * factor), gradients(x, GradientScales(), factor), strict=True):
        assert sqnr(one, other) > 16
        assert (other.dtype, other.shape) == (torch.bfloat16, one.shape)


def test_a_sink_saturates_once():
    """Every query attends to the first token, whose gradients are hundreds of times larger than others."""
    torch.manual_seed(1)
    q, k, v, dy = oracle.given(1, 4, 1, 200, 200)
    q[..., 0], k[..., 0] = 8, 0
    k[:, :, 0, 0] = 16
    x = q, k, v, dy + dy.abs().amax()
    scales, exact = GradientScales(), oracle.exact(*x)
    first, second = gradients(x, scales)[3], gradients(x, scales)[3]
    assert sqnr(exact[3], first) < 10
    assert sqnr(exact[3], second) > 20


def test_the_amax_decays_and_ignores_what_is_not_finite():
    scales = GradientScales()
    scales.observe(torch.tensor([1.0, 2.0, 3.0]))
    scales.observe(torch.tensor([0.5, 4.0, torch.inf]))
    assert torch.allclose(scales.amax, torch.tensor([DECAY, 4.0, 3 * DECAY]))
    assert not scales.state_dict()


def test_double_backward_is_refused():
    x = [t.requires_grad_() for t in oracle.given(1, 2, 2, 8, 8)[:3]]
    (dq,) = torch.autograd.grad(attend_fp8(*x, GradientScales()).float().sum(), x[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.sum().backward()


@pytest.mark.slow
def test_compiled():
    torch.manual_seed(2)
    x, scales, other = oracle.given(1, 2, 2, 32, 32), GradientScales(), GradientScales()
    leaves = [t.detach().clone().requires_grad_() for t in x[:3]]
    run = torch.compile(lambda *t: attend_fp8(*t, other) * 1, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        expected = gradients(x, scales)
        y = run(*leaves)
        actual = [y.detach(), *torch.autograd.grad(y, leaves, x[3])]
        for one, found in zip(expected, actual, strict=True):
            assert torch.equal(one, found)
        assert torch.equal(scales.amax, other.amax)
