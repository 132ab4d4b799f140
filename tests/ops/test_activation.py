"""The activations of a CPU against float64: torch's own, their gradients by autograd, and the casts of ml_dtypes.

As with the norms (test_norm.py), a code must be that of the float64 value, or of one within a few roundings of the
magnitudes that are added: in 1 + erf(u) for a very negative u, and in a slope that crosses zero, most of them cancel.
"""

import pytest
import torch
from activation_oracle import given, gradient64, gradient_magnitude, h64, h_magnitude, on_the_border
from bits import bits
from fused_op_examples import CASTS, DTYPES, NEAR, SIZES, assert_nan_in_one_row
from operation_examples import routing
from quantize_oracle import assert_rounds_to, name_of

from octavo.numerics import Cast
from octavo.ops import activation_backward, activation_quantize, activation_scales
from octavo.ops.activation import WIDTHS
from octavo.ops.launching import Factors

E4M3 = Cast()


def backward(dh, u, kind, cast=E4M3, h_cast=E4M3, *, biased=False, **factors):
    """`activation_backward` after its forward; factors that are not given are ones."""
    ones = {"column_scale": torch.ones(1, u.shape[1]), "mantissa_of": torch.ones(u.shape[0], 1)}
    h_scale = activation_quantize(u, kind, h_cast).scale
    return activation_backward(
        dh, u, kind, cast, Factors(**ones | factors), h_cast=h_cast, h_scale=h_scale, biased=biased
    )


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_forward(cast, shape, dtype, kind):
    u = given(kind, shape, dtype)[0]
    q = activation_quantize(u, kind, cast)
    assert_rounds_to(q, h64(u.double(), kind), NEAR * h_magnitude(u, kind), cast)
    assert torch.equal(activation_scales(u, kind, cast), q.scale)
    larger = activation_quantize(u, kind, cast, 2 * q.scale)
    assert torch.equal(activation_quantize(u, kind, cast, q.scale).data.float(), q.data.float())
    assert (larger.data.float().abs() <= 0.51 * cast.fmt.max).all()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_backward(cast, shape, dtype, kind, biased):
    u, dh, column_scale, mantissa_of = given(kind, shape, dtype)
    actual = backward(dh, u, kind, cast, column_scale=column_scale, mantissa_of=mantissa_of, biased=biased)
    du, size = gradient64(dh, u, kind), NEAR * gradient_magnitude(dh, u, kind)
    factor = column_scale.double() * torch.frexp(mantissa_of.double())[0] * 2  # of torch from 0.5 to 1
    assert_rounds_to(actual.du, du * factor, size * factor, cast)
    assert (actual.dbias.dtype, actual.dbias.shape) == (torch.float32, du.shape[1:] if biased else (0,))
    if biased:
        assert ((actual.dbias - du.sum(0)).abs() <= (size + NEAR * du.abs()).sum(0)).all()


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("cast", [*CASTS, Cast("int8")], ids=name_of)
def test_backward_makes_the_bytes_of_forward_again(cast, shape, dtype, kind):
    u, dh, _, _ = given(kind, shape, dtype)
    first, again = activation_quantize(u, kind, cast), backward(dh, u, kind, h_cast=cast).h
    assert (again.format, again.granularity) == (first.format, first.granularity)
    assert torch.equal(bits(again.data), bits(first.data))
    assert torch.equal(bits(again.scale), bits(first.scale))


@pytest.mark.parametrize("kind", WIDTHS)
def test_the_bytes_are_made_again_on_the_border_of_two_codes(kind):
    """The order of the roundings, in forward and again, decides which code it is."""
    u = on_the_border(kind)
    first = activation_quantize(u, kind, E4M3)
    assert set(first.data[:, 0].float().tolist()) == {16.0, 18.0}
    assert torch.equal(bits(backward(torch.ones(4096, 2), u, kind).h.data), bits(first.data))


def test_factors_multiply_the_gradient_before_its_amax_is_taken():
    """The factor makes one column the largest, which then decides the scale."""
    u, dh = torch.full((1, 4), 20.0), torch.full((1, 4), 0.5)
    factors = {"column_scale": torch.tensor([[1.0, 2.0, 896.0, 4.0]]), "mantissa_of": torch.full((1, 1), 3.0)}
    lines, one = torch.cat((torch.ones(1, 4), factors["column_scale"])), torch.ones(1, dtype=torch.int32)
    routed = {"group": one, "slot": one - 1, "row": one.view(1, 1) - 1, "weight": torch.ones(1, 1)}
    for given_factors in (factors, factors | {"column_scale": lines} | routed):
        du = backward(dh, u, "gelu", **given_factors).du
        assert torch.equal(du.scale, torch.full((1, 1), 1.5))
        assert torch.equal(du.data.float(), torch.tensor([[0.5, 1.0, 448.0, 2.0]]))


@pytest.mark.parametrize("kind", WIDTHS)
def test_the_gradient_of_the_weights_of_slots(kind):
    u, dh, _, mantissa_of = given(kind, (17, 130), torch.bfloat16)
    group, slot, row, weight = routing(17)
    routed = {"group": group, "slot": slot, "row": row, "weight": weight}
    actual = backward(dh, u, kind, column_scale=torch.ones(2, u.shape[1]), mantissa_of=mantissa_of, **routed)
    products, counted = (dh.double() * h64(u.double(), kind)), torch.where(weight == 0, 2.0**-24, weight).double()
    expected = torch.where(row < 0, 0, products.sum(1)[row] / counted)
    size = torch.where(row < 0, 0, products.abs().sum(1)[row] / counted.abs())
    unrouted = weight.view(-1)[slot.long()] == 0
    assert unrouted.any()
    assert not any(q.dequantize()[unrouted].any() for q in (actual.du, actual.h))
    assert ((actual.dweight - expected).abs() <= 1e-5 * size).all()


# ---- extremes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_far_from_zero(dtype):
    """Beyond 88, exp(-gate) exceeds float32."""
    gate = torch.tensor([[200.0] * 3, [-200.0] * 3, [1e4, 0.0, -1e4], [1e30, 1.0, -1e30]]).to(dtype)
    up, dh = torch.tensor([1.0, -2.0, 3.0], dtype=dtype).expand(4, 3), torch.ones(4, 3, dtype=dtype)
    u = torch.cat((gate, up), 1)
    h = activation_quantize(u, "swiglu", E4M3)
    assert torch.equal(h.scale[0], torch.tensor([600.0 / 448]))
    near, tiny = h.data.float() * h.scale, 1e-30
    assert ((near - h64(u.double(), "swiglu")).abs() <= 0.07 * near.abs() + tiny)[:3].all()
    actual = backward(dh, u, "swiglu")
    assert torch.equal(bits(actual.h.data), bits(h.data))
    assert actual.du.scale.isfinite().all()
    dbias, du = backward(dh[:3], u[:3], "swiglu", biased=True).dbias.double(), gradient64(dh, u, "swiglu")[:3]
    assert ((dbias - du.sum(0)).abs() <= NEAR * du.abs().sum(0) + tiny).all()


@pytest.mark.parametrize("value", [200.0, -200.0, 1e30, -1e30])
def test_gelu_far_from_zero_is_u_or_zero(value):
    u = torch.tensor([[value, 1.0]])
    h = activation_quantize(u, "gelu", E4M3)
    assert torch.equal(h.scale * 448, torch.tensor([[max(value, 0.8413447141647339)]]))
    assert backward(torch.ones(1, 2), u, "gelu", biased=True).dbias[0] == (value > 0)


def test_gelu_is_flat_where_its_density_would_be_subnormal():
    """Below -13.22 the density is zero, not a subnormal that one library flushes and another does not."""
    u = torch.tensor([[-13.0, -13.1, -13.25, -13.3, -14.0, -14.5]]).repeat(1, 40)
    du = backward(torch.ones_like(u), u, "gelu", biased=True).dbias[:6]  # the sum of one row
    assert torch.equal(du != 0, torch.tensor([True, True, False, False, False, False]))
    assert ((du - gradient64(torch.ones(1, 6), u[:, :6], "gelu")[0]).abs() < 1e-37).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    ("kind", "column"), [("gelu", 70), ("swiglu", 70), ("swiglu", 200), ("geglu", 70), ("geglu", 200)]
)
def test_a_row_that_is_not_finite_is_nan_and_no_other(kind, column, value):
    """For a gated activation, both in gate and in up."""
    u, dh, _, _ = given(kind, (17, 130), torch.bfloat16)
    broken = u.clone()
    broken[4, column] = value
    clean, actual = backward(dh, u, kind), backward(dh, broken, kind)
    assert_nan_in_one_row(activation_quantize(broken, kind, E4M3), clean.h, 4)
    assert_nan_in_one_row(actual.h, clean.h, 4)
    assert_nan_in_one_row(actual.du, clean.du, 4)


@pytest.mark.parametrize("kind", WIDTHS)
def test_a_gradient_that_is_not_finite_spoils_its_row_and_not_h(kind):
    u, dh, _, _ = given(kind, (17, 130), torch.bfloat16)
    broken = dh.clone()
    broken[4, 70] = torch.nan
    clean, actual = backward(dh, u, kind), backward(broken, u, kind)
    assert_nan_in_one_row(actual.du, clean.du, 4)
    assert torch.equal(bits(actual.h.data), bits(clean.h.data))
