"""The activations of a CPU against float64: torch's own, their gradients by autograd, and the casts of ml_dtypes.

As with the norms (test_norm.py), a code must be that of the float64 value, or of one within a few roundings of the
magnitudes that meet: in 1 + erf(u) for a very negative u, and in a slope that crosses zero, most of them cancel.
"""

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantize_oracle import matrix, name_of
from test_norm import CASTS, DTYPES, FLOAT, NEAR, REFUSED, SIZES, assert_rounds_to, bits, kernels_on_the_cpu
from torch import Tensor

from octavo.numerics import Cast
from octavo.ops import activation_backward, activation_quantize
from octavo.ops.activation import op, reference
from octavo.ops.activation.op import ActivationGradient
from octavo.ops.triton_support import LONGEST_ROW

KINDS = {"swiglu": 2, "gelu": 1}  # columns of u for one of h
E4M3 = Cast()
UNDERFLOW = 2e-35  # what the twin's sigmoid may differ by where the true one is smaller


@cache
def given(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """u, dh, column_scale and row_scale for h of this shape; made once: nobody here writes into them."""
    m, f = shape
    u = matrix((m, f * KINDS[kind]), dtype)
    dh = (torch.randn(m, f) * torch.exp2(torch.randint(-20, 5, (m, 1)))).to(dtype)
    return u, dh, torch.rand(1, u.shape[1]) + 0.01, 1 + torch.rand(m, 1)


def h64(u: Tensor, kind: str) -> Tensor:
    if kind == "gelu":
        return F.gelu(u)
    gate, up = u.chunk(2, 1)
    return F.silu(gate) * up


def gradient64(dh: Tensor, u: Tensor, kind: str) -> Tensor:
    u = u.double().requires_grad_()
    h64(u, kind).backward(dh.double())
    return u.grad


def h_magnitude(u: Tensor, kind: str) -> Tensor:
    """What meets in h, in units of NEAR."""
    u = u.double()
    if kind == "gelu":
        return u.abs()
    gate, up = u.chunk(2, 1)
    return h64(u, kind).abs() * exponent_magnitude(gate) + (gate * up).abs() * (UNDERFLOW / NEAR)


def exponent_magnitude(gate: Tensor) -> Tensor:
    """What meets in sigmoid(gate) over itself: the exponent gate log2(e) of two is rounded to float32."""
    return 1 + gate.abs() * (2**-24 / NEAR)


def gradient_magnitude(dh: Tensor, u: Tensor, kind: str) -> Tensor:
    """What meets in the gradient of u."""
    dh, u = dh.double().abs(), u.double()
    if kind == "gelu":
        return dh
    gate, up = u.chunk(2, 1)
    sigmoid = gate.sigmoid() * exponent_magnitude(gate) + UNDERFLOW / NEAR
    return torch.cat((dh * up.abs() * sigmoid * (1 + gate.abs()), dh * gate.abs() * sigmoid), 1)


def backward(
    dh: Tensor, u: Tensor, kind: str, cast: Cast = E4M3, h_cast: Cast = E4M3, *, keep: bool = False, **scales: Tensor
) -> ActivationGradient:
    """`activation_backward` after its forward; factors of one where none are given."""
    ones = {"column_scale": torch.ones(1, u.shape[1]), "row_scale": torch.ones(u.shape[0], 1)}
    h_scale = activation_quantize(u, kind, h_cast).scale
    return activation_backward(dh, u, kind, cast, **ones | scales, h_cast=h_cast, h_scale=h_scale, keep=keep)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_forward(cast, shape, dtype, kind):
    u = given(kind, shape, dtype)[0]
    q = activation_quantize(u, kind, cast)
    assert_rounds_to(q, h64(u.double(), kind), NEAR * h_magnitude(u, kind), cast)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_backward(cast, shape, dtype, kind, keep):
    u, dh, column_scale, row_scale = given(kind, shape, dtype)
    found = backward(dh, u, kind, cast, column_scale=column_scale, row_scale=row_scale, keep=keep)
    du, size = gradient64(dh, u, kind), NEAR * gradient_magnitude(dh, u, kind)
    factor = column_scale.double() * row_scale.double()
    assert_rounds_to(found.du, du * factor, size * factor, cast)
    assert (found.wide.dtype, found.wide.shape) == (dtype, du.shape if keep else (0,))
    if keep:
        last = torch.finfo(dtype).eps * (du.abs() / 2 + torch.finfo(dtype).tiny)
        assert ((found.wide - du).abs() <= size + last).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_backward_makes_the_bytes_of_forward_again(cast, shape, dtype, kind):
    u, dh, _, _ = given(kind, shape, dtype)
    first, again = activation_quantize(u, kind, cast), backward(dh, u, kind, h_cast=cast).h
    assert (again.format, again.layout) == (first.format, first.layout)
    assert torch.equal(bits(again.data), bits(first.data))
    assert torch.equal(bits(again.scale), bits(first.scale))


def on_the_border(kind: str) -> Tensor:
    """u of 4096 rows of two: the first h is 17/448 of the second, midway between two codes of E4M3, 16 and 18."""
    first = torch.rand(4096, KINDS[kind]) * 5 + 0.5
    largest = h64(first.double(), kind).float() * 448 / 17
    if kind == "gelu":
        return torch.cat((first, largest), 1)  # beyond 6, gelu(u) is u
    gate, up = first.chunk(2, 1)
    return torch.cat((gate, torch.full_like(gate, 128.0), up, largest / 128), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_are_made_again_on_the_border_of_two_codes(kind):
    """The order of the roundings, in forward and again, decides which code it is."""
    u = on_the_border(kind)
    first = activation_quantize(u, kind, E4M3)
    assert set(first.data[:, 0].float().tolist()) == {16.0, 18.0}
    again = backward(torch.ones(4096, 2), u, kind).h
    assert torch.equal(bits(again.data), bits(first.data))


def test_factors_multiply_the_gradient_before_its_amax_is_taken():
    """A column that its factor makes the largest decides the scale."""
    u, dh = torch.full((1, 4), 20.0), torch.ones(1, 4)
    factors = {"column_scale": torch.tensor([[1.0, 2.0, 896.0, 4.0]]), "row_scale": torch.full((1, 1), 0.5)}
    du = backward(dh, u, "gelu", **factors).du
    assert torch.equal(du.scale, torch.ones(1, 1))
    assert torch.equal(du.data.float(), torch.tensor([[0.5, 1.0, 448.0, 2.0]]))


# ---- extremes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_far_from_zero(dtype):
    """Beyond 88, exp(-gate) is no float32."""
    gate = torch.tensor([[200.0] * 3, [-200.0] * 3, [1e4, 0.0, -1e4], [1e30, 1.0, -1e30]]).to(dtype)
    up, dh = torch.tensor([1.0, -2.0, 3.0], dtype=dtype).expand(4, 3), torch.ones(4, 3, dtype=dtype)
    u = torch.cat((gate, up), 1)
    h = activation_quantize(u, "swiglu", E4M3)
    assert torch.equal(h.scale[0], torch.tensor([600.0 / 448]))
    near, tiny = h.data.float() * h.scale, 1e-30
    assert ((near - h64(u.double(), "swiglu")).abs() <= 0.07 * near.abs() + tiny)[:3].all()
    found = backward(dh, u, "swiglu", keep=True)
    assert torch.equal(bits(found.h.data), bits(h.data))
    assert found.du.scale.isfinite().all()
    wide, du = found.wide.double(), gradient64(dh, u, "swiglu")
    assert ((wide - du).abs() <= torch.finfo(dtype).eps * du.abs() + tiny)[:3].all()


@pytest.mark.parametrize("value", [200.0, -200.0, 1e30, -1e30])
def test_gelu_far_from_zero_is_u_or_zero(value):
    u = torch.tensor([[value, 1.0]])
    h = activation_quantize(u, "gelu", E4M3)
    assert torch.equal(h.scale * 448, torch.tensor([[max(value, 0.8413447141647339)]]))
    found = backward(torch.ones(1, 2), u, "gelu", keep=True)
    assert found.wide[0, 0] == (value > 0)


def test_gelu_is_flat_where_its_density_would_be_subnormal():
    """From -13.22 down: zero, not a subnormal that one library flushes and another does not."""
    u = torch.tensor([[-13.0, -13.1], [-13.25, -13.3], [-14.0, -14.5]]).repeat(1, 40)
    wide = backward(torch.ones_like(u), u, "gelu", keep=True).wide[:, :2]
    assert torch.equal(wide != 0, torch.tensor([[True, True], [False, False], [False, False]]))
    assert ((wide - gradient64(torch.ones_like(wide), u[:, :2], "gelu")).abs() < 1e-37).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("kind", "column"), [("gelu", 70), ("swiglu", 70), ("swiglu", 200)])
def test_a_row_that_is_not_finite_is_nan_and_no_other(kind, column, value):
    """In swiglu, in the gate and in up."""
    u, dh, _, _ = given(kind, (17, 130), torch.bfloat16)
    broken = u.clone()
    broken[4, column] = value
    clean, found = backward(dh, u, kind), backward(dh, broken, kind)
    others = torch.arange(17) != 4
    forward = activation_quantize(broken, kind, E4M3)
    for q, required in ((forward, clean.h), (found.h, clean.h), (found.du, clean.du)):
        assert q.scale[4].isnan().all()
        assert q.data[4].float().isnan().all()
        assert torch.equal(bits(q.data)[others], bits(required.data)[others])
        assert torch.equal(bits(q.scale)[others], bits(required.scale)[others])


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_spoils_its_row_and_not_h(kind):
    u, dh, _, _ = given(kind, (17, 130), torch.bfloat16)
    broken = dh.clone()
    broken[4, 70] = torch.nan
    clean, found = backward(dh, u, kind), backward(broken, u, kind)
    assert found.du.data[4].float().isnan().all()
    assert torch.equal(found.du.scale.isnan().flatten(), torch.arange(17) == 4)
    assert torch.equal(bits(found.h.data), bits(clean.h.data))


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_give_zeros_under_the_smallest_scale(kind):
    u = torch.zeros(3, 8)
    dh = torch.zeros(3, 8 // KINDS[kind])
    found = backward(dh, u, kind)
    for q in (activation_quantize(u, kind, E4M3), found.h, found.du):
        assert not bits(q.data).any()
        assert (q.scale == 2.0**-126).all()


# ---- the registered operations


def arguments(kind: str, shape: tuple[int, int], keep: bool, device: str = "cpu") -> tuple[tuple, tuple]:
    """Of the two operations."""
    u, dh, column_scale, row_scale = (t.to(device) for t in given(kind, shape, torch.bfloat16))
    forward = u, kind, "e4m3", "fp32"
    h_scale = 1000 * row_scale  # so that no h is beyond 448 of it
    return forward, (dh, u, kind, "e5m2", "pow2", column_scale, row_scale, "e4m3", h_scale, keep)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_opcheck(kind, keep):
    forward, back = arguments(kind, (5, 70), keep)
    torch.library.opcheck(torch.ops.octavo.activation_quantize.default, forward)
    torch.library.opcheck(torch.ops.octavo.activation_backward.default, back)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("shape", [*SIZES, (0, 7)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_on_the_meta_device(kind, shape, keep):
    operations = torch.ops.octavo.activation_quantize, torch.ops.octavo.activation_backward
    both = zip(operations, arguments(kind, shape, keep), arguments(kind, shape, keep, "meta"), strict=True)
    for operation, real, fake in both:
        for one, other in zip(operation(*real), operation(*fake), strict=True):
            assert other.device.type == "meta"
            assert (one.shape, one.dtype, one.is_contiguous()) == (other.shape, other.dtype, other.is_contiguous())


def turned(values: tuple[Any, ...]) -> list[Any]:
    """The same matrices, laid out by columns."""
    return [v.t().contiguous().t() if isinstance(v, Tensor) and v.shape[0] == 17 else v for v in values]


@pytest.mark.parametrize("kind", KINDS)
def test_strided_inputs_give_contiguous_results(kind):
    """What is compiled believes the fake's strides."""
    forward, back = map(turned, arguments(kind, (17, 130), True))
    results = *torch.ops.octavo.activation_quantize(*forward), *torch.ops.octavo.activation_backward(*back)
    assert all(t.is_contiguous() for t in results)


@pytest.mark.parametrize("kind", KINDS)
def test_strided_inputs_give_the_same_numbers(kind):
    operations = torch.ops.octavo.activation_quantize, torch.ops.octavo.activation_backward
    for operation, values in zip(operations, arguments(kind, (17, 130), True), strict=True):
        for one, other in zip(operation(*values), operation(*turned(values)), strict=True):
            assert torch.equal(bits(one), bits(other))


# ---- where the kernels run


def run_both(u: Tensor, dh: Tensor, kind: str, cast: Cast, h_cast: Cast) -> list[Tensor]:
    """What both operations return, with factors that are not contiguous where they could be."""
    column_scale, row_scale = torch.ones(1, 1).expand(1, u.shape[1]), torch.ones(1, 1).expand(u.shape[0], 1)
    q = activation_quantize(u, kind, cast)
    factors = {"column_scale": column_scale, "row_scale": row_scale, "h_scale": row_scale}
    found = activation_backward(dh, u, kind, cast, h_cast=h_cast, keep=True, **factors)
    return [q.data, q.scale, found.du.data, found.du.scale, found.h.data, found.wide]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "fmt", "h_fmt", "ran"),
    [
        ((5, 70), "e4m3", "e5m2", 2),
        ((5, 70), "e4m3fnuz", "e4m3", 0),
        ((5, 70), "e4m3", "e5m2fnuz", 1),
        ((1, LONGEST_ROW), "e4m3", "e4m3", 2),
        ((1, LONGEST_ROW + 1), "e4m3", "e4m3", 0),
        ((0, 7), "e4m3", "e4m3", 0),
        ((5, 0), "e4m3", "e4m3", 0),
    ],
    ids=str,
)
def test_kernels_run_for_their_formats_and_lengths(shape, fmt, h_fmt, ran, kind, monkeypatch):
    values = torch.randn(shape[0], shape[1] * KINDS[kind]), torch.randn(shape), kind, Cast(fmt), Cast(h_fmt)
    required = run_both(*values)
    operations = {name: getattr(reference, name) for name in ("activation_quantize", "activation_backward")}
    calls = kernels_on_the_cpu(monkeypatch, op, **operations)
    found = run_both(*values)
    assert len(calls) == ran
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(found, required, strict=True))


def test_kernels_get_contiguous_tensors(monkeypatch):
    operations = {name: getattr(reference, name) for name in ("activation_quantize", "activation_backward")}
    calls = kernels_on_the_cpu(monkeypatch, op, **operations)
    run_both(torch.randn(140, 5).t(), torch.randn(70, 5).t(), "swiglu", E4M3, E4M3)
    tensors = [value for values in calls for value in values if isinstance(value, Tensor)]
    assert len(tensors) == 1 + 5
    assert all(t.is_contiguous() for t in tensors)


# ---- what is refused


@pytest.mark.parametrize("cast", REFUSED, ids=str)
def test_casts_that_the_kernels_do_not_do_are_refused(cast):
    u, row, column = torch.ones(3, 8), torch.ones(3, 1), torch.ones(1, 8)
    message = r"takes a cast by row, rounded to nearest, with scale 'fp32' or 'pow2', .*got Cast\(.*: change the cast"
    factors = {"column_scale": column, "row_scale": row, "h_scale": row}
    with pytest.raises(ValueError, match="activation_quantize " + message):
        activation_quantize(u, "gelu", cast)
    for du_cast, h_cast in ((cast, E4M3), (E4M3, cast)):
        with pytest.raises(ValueError, match="activation_backward " + message):
            activation_backward(u, u, "gelu", du_cast, h_cast=h_cast, keep=False, **factors)


BAD = [
    ("relu", torch.ones(3, 8), "unknown activation 'relu': choose one of swiglu, gelu"),
    ("swiglu", torch.ones(3, 7), r"swiglu takes a matrix .* whose columns divide by 2, got torch.float32 \[3, 7\]"),
    ("swiglu", torch.ones(8), r"swiglu takes a matrix .* whose columns divide by 2, got torch.float32 \[8\]"),
    ("gelu", torch.ones(2, 3, 8), r"gelu takes a matrix of .* got torch.float32 \[2, 3, 8\]"),
    (
        "gelu",
        torch.ones(3, 8).int(),
        r"gelu takes a matrix of float32, bfloat16 or float16 .* got torch.int32 \[3, 8\]",
    ),
    ("swiglu", torch.ones(3, 8).double(), r"swiglu takes a matrix of float32, .* got torch.float64 \[3, 8\]"),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("kind", "u", "message"), BAD, ids=lambda v: str(v)[:12])
def test_unknown_kinds_and_other_matrices_are_refused(kind, u, message, device):
    u = u.to(device)
    row, column = (torch.ones(s, device=device) for s in ((3, 1), (1, u.shape[-1])))
    with pytest.raises(ValueError, match=message):
        activation_quantize(u, kind, E4M3)
    with pytest.raises(ValueError, match=message):
        activation_backward(u, u, kind, E4M3, column_scale=column, row_scale=row, h_cast=E4M3, h_scale=row, keep=False)


BAD_BACKWARD = [
    *(("dh", torch.ones(s), rf"dh must be {FLOAT} \[3, 4\], got") for s in ((3, 8), (2, 4), (1, 4), (12,))),
    ("dh", torch.ones(3, 4).int(), rf"dh must be {FLOAT} \[3, 4\], got torch.int32 \[3, 4\]"),
    *(
        ("column_scale", t, r"column_scale must be torch.float32 \[1, 8\], got")
        for t in (torch.ones(8), torch.ones(1, 4), torch.ones(8, 1), torch.ones(1, 8).bfloat16())
    ),
    *(
        (name, t, rf"{name} must be torch.float32 \[3, 1\], got")
        for name in ("row_scale", "h_scale")
        for t in (torch.ones(3), torch.ones(1, 1), torch.ones(1, 3), torch.ones(3, 1).to(torch.float8_e8m0fnu))
    ),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("name", "tensor", "message"), BAD_BACKWARD, ids=lambda v: str(v)[:12])
def test_other_shapes_and_dtypes_are_refused_in_backward(name, tensor, message, device):
    shapes = {"dh": (3, 4), "u": (3, 8), "column_scale": (1, 8), "row_scale": (3, 1), "h_scale": (3, 1)}
    values = {key: torch.ones(shape, device=device) for key, shape in shapes.items()} | {name: tensor.to(device)}
    with pytest.raises(ValueError, match=message):
        activation_backward(**values, kind="swiglu", cast=E4M3, h_cast=E4M3, keep=False)
