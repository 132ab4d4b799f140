"""The numbers of norm+linear and of the MLP as one function each: against float64 on the very bytes that the formulas
name (`fused_oracle`), and against the layers that they replace."""

import pytest
import torch
from fused_oracle import (
    AUTOCAST_DB,
    BFLOAT16_DB,
    BUILDERS,
    FLOAT32_DB,
    NEAR_UNQUANTIZED_DB,
    QUANTIZED_DB,
    SAME_BYTES_DB,
    NormThenLinears,
    check,
    check_equal,
    exact,
    exact_unquantized,
    gelu,
    is_fused,
    linears,
    make_norm,
    run,
    swiglu,
    tokens,
)
from metrics import sqnr

import octavo


@pytest.mark.parametrize(
    ("dtype", "autocast", "least"),
    [(torch.float32, False, FLOAT32_DB), (torch.bfloat16, False, BFLOAT16_DB), (torch.float32, True, AUTOCAST_DB)],
    ids=["fp32", "bf16", "autocast"],
)
@pytest.mark.parametrize(
    ("norm", "size", "bias", "with_residual"),
    [
        ("rms", (1, 40, 24), True, True),
        ("rms without eps", (7, 64, 33), False, True),
        ("llama", (33, 130, 97), True, False),
        ("layer", (130, 64, 112), False, False),
        ("layer without bias", (1, 40, 24), True, True),
    ],
)
@BUILDERS
def test_outputs_and_gradients_are_the_formulas_of_their_bytes(
    build, norm: str, size: tuple[int, int, int], bias: bool, with_residual: bool,
    dtype: torch.dtype, autocast: bool, least: float,
) -> None:  # fmt: skip
    t, k, f = size
    if autocast:  # so that each norm is tested with and without bias and residual
        bias, with_residual = not bias, not with_residual
    block = build(norm, k, f, bias).to(dtype)
    x, residual = tokens(t, k, dtype), tokens(t, k, dtype) if with_residual else None
    octavo.convert(block)
    assert is_fused(block, x)
    actual = run(block, block, x, residual, autocast=autocast)
    check(exact(block, x, residual, torch.bfloat16 if autocast else dtype), actual, least)
    if with_residual:
        assert torch.equal(actual["d x"], actual["d residual"])


@pytest.mark.parametrize("size", [(1, 40, 24), (7, 64, 33), (33, 130, 97), (130, 64, 112)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("build", [swiglu, gelu])
def test_an_mlp_without_a_norm(build, size: tuple[int, int, int], bias: bool) -> None:
    t, k, f = size
    for dtype, least in ((torch.float32, FLOAT32_DB), (torch.bfloat16, BFLOAT16_DB)):
        block, x = build("none", k, f, bias).to(dtype), tokens(t, k, dtype)
        octavo.convert(block)
        check(exact(block, x, None, dtype), run(block, block, x), least)


@BUILDERS
def test_near_the_exact_function_and_nearer_to_the_layers_it_replaces(build) -> None:
    """In float32, where nothing is rounded on the way from one operation to the next."""
    block, x, residual = build(), tokens(130), tokens(130)
    unquantized = exact_unquantized(block, x, residual)
    octavo.convert(block)
    actual = run(block, block, x, residual)
    check(unquantized, actual, NEAR_UNQUANTIZED_DB)
    assert sqnr(unquantized["output 0"], actual["output 0"]) < QUANTIZED_DB
    check(run(block, block.separate, x, residual), actual, SAME_BYTES_DB)


@BUILDERS
def test_outputs_have_the_dtype_of_the_layers_and_gradients_that_of_their_tensors(build) -> None:
    block, x, residual = build(), tokens(7), tokens(7)
    octavo.convert(block)
    with torch.autocast("cpu", torch.bfloat16):
        *ys, total = block(x, residual)
    assert {y.dtype for y in ys} == {torch.bfloat16}
    assert total.dtype == torch.float32
    assert torch.equal(total, x + residual)
    actual = run(block, block, x, residual, autocast=True)
    assert {t.dtype for name, t in actual.items() if name.startswith("d ")} == {torch.float32}


@BUILDERS
def test_any_rank_and_any_strides(build) -> None:
    block = build()
    octavo.convert(block)
    x, residual = tokens(30).view(2, 3, 5, 64), tokens(30).view(2, 3, 5, 64)
    flat = block(x.view(30, 64), residual.view(30, 64))
    for y, y_flat in zip(block(x, residual), flat, strict=True):
        assert torch.equal(y, y_flat.view(*x.shape[:-1], -1))
    turned = x.transpose(0, 2).contiguous().transpose(0, 2)
    check_equal(run(block, block, x, residual), run(block, block, turned, residual))
    for y, y_flat in zip(block(x[0, 0, 0], residual[0, 0, 0]), flat, strict=True):
        torch.testing.assert_close(y, y_flat[0])


@BUILDERS
def test_gradients_that_are_expanded_or_absent(build) -> None:
    """A sum's gradient has strides of zero; an output that nobody used has none."""
    block, x, residual = build(), tokens(7).requires_grad_(), tokens(7)
    octavo.convert(block)
    (summed,) = torch.autograd.grad(block(x, residual)[0].sum(), x)
    y, *_ = block(x, residual)
    assert torch.equal(torch.autograd.grad(y, x, torch.ones_like(y))[0], summed)
    dtotal = torch.randn(7, 64)
    block(x, residual)[-1].backward(dtotal)
    assert torch.equal(x.grad, dtotal)
    assert not any(p.grad.any() for p in block.parameters())


@pytest.mark.parametrize("shape", [(6, 64), (2, 3, 64)])
@BUILDERS
def test_gradients_of_x_and_of_the_residual_add_up_apart(build, shape: tuple[int, ...]) -> None:
    """They are equal, but must not be one tensor: leaves add later gradients in place."""
    block, x, residual = build(), tokens(6).view(shape).requires_grad_(), tokens(6).view(shape).requires_grad_()
    octavo.convert(block)
    for _ in range(3):
        block(x, residual)[0].square().sum().backward()
    (once,) = torch.autograd.grad(block(x, residual)[0].square().sum(), x)
    torch.testing.assert_close(x.grad, 3 * once)
    torch.testing.assert_close(residual.grad, 3 * once)


@pytest.mark.parametrize(("build", "bad"), [(linears, torch.inf), (swiglu, torch.nan), (gelu, torch.inf)])
def test_a_non_finite_value_never_turns_into_a_number(build, bad: float) -> None:
    block, x = build(), tokens(33)
    octavo.convert(block)
    x[2, 3] = bad
    y = run(block, block, x)["output 0"]
    assert not y[2].isfinite().any()
    assert y[[0, 1, *range(3, 33)]].isfinite().all()
    x[2, 3] = 0
    x.requires_grad_()
    y, *_ = block(x)
    dy = torch.randn_like(y)
    dy[4, 1] = bad
    y.backward(dy)
    assert not x.grad[4].isfinite().any()
    assert x.grad[[*range(4), *range(5, 33)]].isfinite().all()
    assert not any(p.grad.isfinite().all() for name, p in block.named_parameters() if name.endswith("weight"))


@BUILDERS
def test_all_zero_tokens_and_gradients_give_zeros_not_nan(build) -> None:
    block = build("rms", bias=False)
    octavo.convert(block)
    x = torch.zeros(7, 64, requires_grad=True)
    *ys, _ = block(x)
    for y in ys:
        assert not y.any()
    torch.autograd.backward(ys, [torch.zeros_like(y) for y in ys])
    assert not x.grad.any()
    assert not any(p.grad.any() for p in block.parameters())


def test_a_root_mean_square_norm_without_eps_has_that_of_torch() -> None:
    """For BF16 too it is float32's, 1.2e-7: BF16's own, 0.0078, would swamp small tokens."""
    for dtype in (torch.float32, torch.bfloat16):
        block, x = linears("rms without eps").to(dtype), tokens(33, dtype=dtype) * 0.1
        plain = block.separate(x)
        octavo.convert(block)
        assert sqnr(plain[0], block(x)[0]) > NEAR_UNQUANTIZED_DB, dtype


def test_layers_with_and_without_a_bias_side_by_side() -> None:
    block = NormThenLinears(make_norm("rms", 64), 64, (40, 17, 1), (False, True, False))
    octavo.convert(block)
    x = tokens(7)
    check(exact(block, x, None, torch.float32), run(block, block, x), FLOAT32_DB)


def test_a_low_precision_delta_leaves_the_stream_as_precise_as_it_was() -> None:
    """As plain PyTorch adds, whichever of the two is the wider, and whichever is called residual."""
    block, wide, narrow = swiglu(), tokens(7), tokens(7, dtype=torch.bfloat16)
    octavo.convert(block)
    with torch.autocast("cpu", torch.bfloat16):
        for pair in ((wide, narrow), (narrow, wide)):
            total = block(*pair)[1]
            assert total.dtype == torch.float32
            assert torch.equal(total, wide + narrow)
