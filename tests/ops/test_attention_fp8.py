"""Attention in E4M3 on a CPU: against float64, and the calls that it refuses."""

import attention_fp8_oracle as oracle
import pytest
import torch
from metrics import sqnr

from octavo.ops import attention_fp8 as op
from octavo.ops import fp8_attention, fp8_attention_limit

SHAPES = [(2, 4, 2, 96, 96), (1, 2, 2, 33, 70), (1, 3, 1, 1, 5)]  # batch, heads, heads of keys, tokens, keys


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape):
    x = oracle.given(*shape)
    actual, _, amax = oracle.both_passes(x)
    expected = oracle.exact(*x)
    for one, other, least in zip(expected, actual, (22, 16, 16, 20), strict=True):
        if one.abs().amax() > 0:  # the first token attends to itself alone: no gradient of q and k
            assert sqnr(one, other) > least
            assert (other.dtype, other.shape) == (torch.bfloat16, one.shape)
    assert torch.allclose(amax.double(), torch.stack([g.abs().amax() for g in expected[1:]]), rtol=0.15, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64_with_the_same_roundings(shape):
    actual, (q, k, v, dy, out_scales), _ = oracle.both_passes(oracle.given(*shape))
    ds_scale = 1.75 * 448 * 128**-0.5 * float(dy.scale) * float(v.scale)
    for one, other in zip(oracle.rounded(q, k, v, dy, out_scales, ds_scale), actual, strict=True):
        assert sqnr(one, other) > 40  # ties, and the rounding to BF16


def test_ds_does_not_saturate():
    """Peaked softmaxes and log-normal tokens; saturated ds would leave a few dB."""
    q, k, v, dy = oracle.given(1, 2, 2, 256, 256)
    x = 2 * q, k, v * torch.randn(1, 1, 256, 1).exp(), dy * (1.5 * torch.randn(1, 1, 256, 1)).exp()
    actual, *_ = oracle.both_passes([t.bfloat16() for t in x])
    for one, other in zip(oracle.exact(*x)[1:], actual[1:], strict=True):
        assert sqnr(one, other) > 13


def test_the_result_is_in_memory_by_token():
    q, k, v, _ = map(oracle.quantized, oracle.given(2, 4, 2, 8, 8))
    attended = fp8_attention(q.data, k.data, v.data, q.scale, k.scale, v.scale, dtype=torch.float32)
    assert attended.y.dtype == torch.float32
    assert attended.y.transpose(1, 2).is_contiguous()
    assert (attended.o.dtype, attended.o.shape) == (torch.float8_e4m3fn, (2, 8, 4, 128))
    assert torch.equal(attended.o.float() * v.scale, attended.y.transpose(1, 2))


def test_nan_in_a_value_reaches_the_result():
    x = oracle.given(1, 2, 2, 8, 8)
    x[2][0, 0, 3, 5] = torch.nan
    q, k, v, _ = map(oracle.quantized, x)
    assert fp8_attention(q.data, k.data, v.data, q.scale, k.scale, v.scale).y[0, 0, 3:].isnan().all()


def test_one_query_needs_no_cudnn(monkeypatch):
    q, k, v, _ = map(oracle.quantized, oracle.given(1, 4, 2, 1, 5))
    values = q.data, k.data, v.data, q.scale, k.scale, v.scale
    expected = fp8_attention(*values).y
    monkeypatch.setattr(op, "_runs_cudnn", lambda q: True)
    assert torch.equal(fp8_attention(*values).y, expected)


def test_limits():
    assert "NVIDIA GPU" in fp8_attention_limit(torch.device("cpu"), 128)
