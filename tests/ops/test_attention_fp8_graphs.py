"""The layouts and addresses that cuDNN gets for FP8 attention, on a CPU: a fake one computes by them alone."""

import attention_fp8_oracle as oracle
import fake_cudnn
import pytest
import torch
from metrics import sqnr
from torch import Tensor

from octavo.nn.attention_layers import GradientScales, attend_fp8
from octavo.ops import fp8_attention, fp8_attention_backward

pytest.importorskip("triton")
pytestmark = pytest.mark.triton

SHAPES = [  # batch, heads, heads of keys, tokens, elements of a head
    (2, 4, 2, 128, 128),
    (1, 1, 1, 128, 128),
    (2, 4, 2, 128, 64),
    (1, 2, 1, 256, 64),
]


def both(x: tuple[Tensor, ...], attend=attend_fp8) -> list[Tensor]:
    """y, dq, dk and dv."""
    leaves = [t.detach().clone().requires_grad_() for t in x[:3]]
    y = attend(*leaves, GradientScales())
    return [y.detach(), *torch.autograd.grad(y, leaves, x[3])]


def compiled(*x):
    return attend_fp8(*x) * 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_passes_eager_and_compiled(monkeypatch, shape):
    batch, heads, kv_heads, tokens, dim = shape
    x = oracle.given(batch, heads, kv_heads, tokens, tokens, dim)
    expected = both(x)  # by the reference
    graphs = fake_cudnn.use(monkeypatch)
    found = both(x)
    assert [key[0] for key in graphs] == ["forward", "backward"]
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other) if dim == 128 else sqnr(one, other) > 40  # sums of padded rows
        assert other.transpose(1, 2).is_contiguous()
    run = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, found, both(x, run)))
    assert len(graphs) == 2


def restrided(x: Tensor) -> list[Tensor]:
    """x [B, H, T, D] by tokens, by heads, in a cache with more room, and with a batch of any stride."""
    room = torch.full((*x.shape[:2], x.shape[2] + 7, x.shape[3]), 448.0).to(x.dtype)
    room.view(torch.uint8)[:, :, : x.shape[2]] = x.view(torch.uint8)
    odd = x.as_strided(x.shape, (1, *x.stride()[1:]))
    return [x, x.contiguous(), room[:, :, : x.shape[2]], odd]


def test_operands_of_any_strides(monkeypatch):
    q, k, v, dy = map(oracle.quantized, oracle.given(1, 4, 2, 128, 128))
    scales, out_scales = (q.scale, k.scale, v.scale), torch.full((3,), 1e-5)
    graphs, found = fake_cudnn.use(monkeypatch), []
    for data in zip(*(restrided(t.data) for t in (q, k, v, dy)), strict=True):
        y, o, stats = fp8_attention(*data[:3], *scales)
        by_token = data[3].transpose(1, 2)
        rest = by_token, *data[:3], o.clone().transpose(0, 1).contiguous().transpose(0, 1), stats, dy.scale, *scales
        found.append([y, *fp8_attention_backward(*rest, out_scales)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    assert [key[0] for key in graphs] == ["forward", "backward", "forward", "forward"]
