"""`rotate_append` and `turn_heads`, against transformers' own functions and our models'."""

import operator

import pytest
import torch
from attention_oracle import DTYPES, new_cache, projections, tables
from bits import assert_same_numbers, bits
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from octavo.models.llama import rotate
from octavo.ops import append_kv, rotate_append, turn_heads

BF16 = torch.bfloat16
SHAPES = [(1, 1, 4, 2, 64), (2, 3, 4, 1, 80), (3, 5, 2, 2, 12), (1, 7, 3, 3, 256)]  # batch, tokens, H, G, D


def heads(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.reshape(*x.shape[:2], -1, dim).transpose(1, 2)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, in memory of [B, T, n, D]."""
    assert actual.transpose(1, 2).is_contiguous()
    assert_same_numbers(actual, expected, nan=False)


@pytest.mark.parametrize("one_table", [False, True])
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_transformers_rotates_and_append_kv_stores(shape, kind, one_table):
    batch, tokens, _, kv_heads, dim = shape
    q, k, v = projections(*shape, BF16)
    cos, sin = tables((1 if one_table else batch, tokens, dim), BF16)
    expected_q, expected_k = apply_rotary_pos_emb(heads(q, dim), heads(k, dim), cos, sin)
    store = new_cache(kind, batch, kv_heads, 11, dim, used=tokens + 2)
    expected = [None if t is None else t.clone() for t in store]
    append_kv(expected_k, heads(v, dim), *expected)
    actual_q, actual_k = rotate_append(q, k, v, cos, sin, *store, keep_k=True)
    same(actual_q, expected_q)
    same(actual_k, expected_k)
    for one, other in zip(store, expected, strict=True):
        assert one is other or torch.equal(bits(one), bits(other))
    assert rotate_append(q, k, v, cos, sin, *store)[1] is None


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_with_tables_in_float32_as_our_models_rotate(dtype):
    q, k, v = projections(2, 3, 4, 2, 16, dtype)
    cos, sin = tables((1, 3, 16), torch.float32)
    actual = rotate_append(q, k, v, cos, sin, *new_cache("bf16", 2, 2, 4, 16, 3), keep_k=True)
    for x, y in zip((q, k), actual, strict=True):
        same(y, rotate(x.view(2, 3, -1, 16), cos[0], sin[0]).transpose(1, 2))


def test_norms_of_heads_are_qwen3s():
    """Its sum of squares has another order, so a few results round to the other side."""
    norms = [Qwen3RMSNorm(64, eps=0.5).bfloat16() for _ in range(2)]  # an eps that the results show
    with torch.no_grad():
        for norm in norms:
            norm.weight.copy_(torch.randn(64))
        q, k, v = projections(4, 32, 4, 2, 64, BF16)
        cos, sin = tables((4, 32, 64), BF16)
        q_n, k_n = (norm(x.view(4, 32, -1, 64)).transpose(1, 2) for norm, x in zip(norms, (q, k), strict=True))
        expected = apply_rotary_pos_emb(q_n, k_n, cos, sin)
        weights = {"q_norm": norms[0].weight, "k_norm": norms[1].weight}
        store = new_cache("bf16", 4, 2, 32, 64, 32)
        actual = rotate_append(q, k, v, cos, sin, *store, **weights, eps=0.5, keep_k=True)
    for one, other in zip(actual, expected, strict=True):
        assert (one != other).double().mean() < 1e-4
        torch.testing.assert_close(one, other, rtol=0, atol=2**-6 * float(other.abs().max()))


def test_no_tokens():
    q, k, v = projections(2, 0, 4, 2, 16, BF16)
    store = new_cache("fp8", 2, 2, 4, 16, 2)
    rotated, kept = rotate_append(q, k, v, *tables((1, 0, 16), BF16), *store, keep_k=True)
    assert (rotated.shape, kept.shape) == ((2, 4, 0, 16), (2, 2, 0, 16))
    assert not store[0].float().any()


# ---- queries and keys without a cache, and their gradients

HERE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def turned(shape: tuple[int, ...], dtype: torch.dtype, one_table: bool, table: torch.dtype | None = None) -> list:
    """q and k, then cos and sin."""
    angles = tables((1 if one_table else shape[0], shape[1], shape[-1]), table or dtype)
    return [*(heads(x, shape[-1]) for x in projections(*shape, dtype)[:2]), *angles]


@HERE
@pytest.mark.parametrize("one_table", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_turn_as_transformers_rotates_and_their_gradients_as_autograd(shape, dtype, one_table, device):
    q, k, cos, sin = (x.to(device) for x in turned(shape, dtype, one_table))
    given = [x.detach().requires_grad_() for x in (q, k)]
    expected = apply_rotary_pos_emb(*given, cos, sin)
    for one, other in zip(turn_heads(q, k, cos, sin, False), expected, strict=True):
        same(one.transpose(1, 2), other)
    gradients = [torch.randn(x.shape, device=device, dtype=dtype) for x in (q, k)]  # a head has another stride
    torch.autograd.backward(expected, gradients)
    for one, x in zip(turn_heads(*gradients, cos, sin, True), given, strict=True):
        assert torch.equal(one.transpose(1, 2), x.grad)  # -0.0 may be 0.0


@HERE
@pytest.mark.parametrize("inverse", [False, True])
def test_heads_turn_by_the_angles_in_float64(inverse, device):
    """As complex numbers. With tables of the dtype each step rounds, and with tables in float32 the result alone."""
    for table, roundings in ((BF16, 3), (torch.float32, 1)):
        q, k, cos, sin = (x.to(device) for x in turned((2, 5, 4, 2, 16), BF16, False, table))
        turn = torch.complex(cos.double(), -sin.double() if inverse else sin.double())[:, None, :, :8]
        for x, actual in zip((q, k), turn_heads(q, k, cos, sin, inverse), strict=True):
            exact = torch.view_as_real(torch.complex(*x.double().chunk(2, -1)) * turn).mT.flatten(-2)
            length = x.double().unflatten(-1, (2, 8)).norm(dim=-2).repeat(1, 1, 1, 2)
            assert ((actual.transpose(1, 2).double() - exact).abs() <= roundings * 2**-8 * length).all()


def kernel(shape: tuple[int, ...], dtype: torch.dtype, one_table: bool, inverse: bool) -> tuple[torch.Tensor, ...]:
    """The results of the kernel and of the reference; run in the interpreter, which has no inline assembly."""
    from octavo.ops.kernels import rotary

    torch.manual_seed(1)
    rotary.add = operator.add
    given = turned(shape, dtype, one_table)
    given[0] = given[0].contiguous()  # strides of its own, as a gradient has
    return *rotary.turn_heads(*given, inverse), *turn_heads(*given, inverse)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 70, 3, 1, 48)], ids=str)
def test_the_kernel_turns_heads_as_the_reference(kernels, shape, inverse, dtype):
    for one_table in (False, True):
        q, k, *expected = kernels.submit(kernel, shape, dtype, one_table, inverse).result()
        for one, other in zip((q, k), expected, strict=True):
            assert torch.equal(bits(one), bits(other))
