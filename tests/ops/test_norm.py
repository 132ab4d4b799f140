"""The norms of a CPU against float64: torch's own norms, their gradients by autograd, and the casts of ml_dtypes.

float32 differs from float64 by a few roundings of the magnitudes that meet in an element (an x that nearly equals the
mean leaves a small difference of large numbers). A code or a scale must be that of the float64 value, unless so small a
difference reaches over a border between two of them: then it may be either.
"""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from quantize_oracle import KINDS, inverse, matrix, name_of, oracle_scale
from torch import Tensor

from octavo.numerics import ROW, TENSOR, Cast, History, QTensor, group
from octavo.ops import norm_backward, norm_quantize, recast_norm
from octavo.ops.norm import op, reference
from octavo.ops.triton_support import LONGEST_ROW

SIZES = [(1, 1), (3, 5), (17, 130), (129, 257)]
DTYPES = [torch.bfloat16, torch.float32]
CASTS = [Cast(), Cast(scale="pow2"), Cast("e5m2")]
REFUSED = [
    Cast(scale="e8m0"),
    Cast(relative_floor=0.1),
    Cast(rounding="stochastic"),
    Cast(granularity=group(32)),
    Cast(granularity=TENSOR),
    Cast(granularity=TENSOR, history=History()),
]
EPS = 1e-5
EPS32 = float(np.float32(EPS))
NEAR = 1e-6  # of the magnitudes that meet: what float32 may differ by


class Given(NamedTuple):
    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None


@cache
def given(shape: tuple[int, int], dtype: torch.dtype, residual: bool = False, bias: bool = False) -> Given:
    """Rows of very different size, one of zeros; made once: nobody here writes into it."""
    x, added = matrix(shape, dtype), matrix((shape[0] + 1, shape[1]), dtype)[: shape[0]]
    weight, shift = (1 + torch.randn(shape[1]) / 4).to(dtype), torch.randn(shape[1]).to(dtype)
    return Given(x, added if residual else None, weight, shift if bias else None)


def norm64(x: Tensor, weight: Tensor, bias: Tensor | None, center: bool, eps: float = EPS) -> Tensor:
    if center:
        return F.layer_norm(x, x.shape[1:], weight, bias, eps)
    n = F.rms_norm(x, x.shape[1:], weight, eps)
    return n if bias is None else n + bias


def statistics64(x: Tensor, center: bool, eps: float = EPS) -> tuple[Tensor, Tensor, Tensor]:
    """mean, rstd, and the magnitudes that meet in x - mean: all float64, from x [M, K] in any dtype."""
    x = x.double()
    mean = x.mean(1, keepdim=True) if center else x.new_zeros(x.shape[0], 1)
    rstd = ((x - mean).square().mean(1, keepdim=True) + eps).rsqrt()
    return mean, rstd, x.abs() + x.abs().mean(1, keepdim=True) * center


def gradients64(dn: Tensor, x: Tensor, weight: Tensor, residual: Tensor | None, center: bool) -> list[Tensor]:
    """Of x (with what came beside the norm), weight and bias, by autograd."""
    leaves = [t.double().requires_grad_() for t in (x, weight, torch.zeros_like(weight))]
    norm64(*leaves, center).backward(dn.double())
    dx, dweight, dbias = (leaf.grad for leaf in leaves)
    return [dx if residual is None else dx + residual.double(), dweight, dbias]


def gradient_magnitudes(dn: Tensor, x: Tensor, weight: Tensor, center: bool) -> tuple[Tensor, Tensor, Tensor]:
    """What meets in each element of the gradients of x, weight and bias."""
    mean, rstd, size = statistics64(x, center)
    unit, dn = size * rstd, dn.double().abs()
    dunit = dn * weight.double().abs()
    dx = (dunit + unit * (unit * dunit).mean(1, keepdim=True) + dunit.mean(1, keepdim=True) * center) * rstd
    return dx, (dn * unit).sum(0), dn.sum(0)


def assert_rounds_to(q: QTensor, value: Tensor, near: Tensor, cast: Cast) -> None:
    """Codes and scales of `q` are those of `value` (float64), or of a number within `near` of it."""
    assert (q.format, q.layout, q.scale.dtype) == (cast.fmt, ROW, torch.float32)
    value, near = value.numpy(), near.numpy()
    scale = q.scale.numpy()
    low, high = oracle_scale(np.maximum(np.abs(value) - near, 0), cast), oracle_scale(np.abs(value) + near, cast)
    assert ((low <= scale) & (scale <= high)).all()
    factor, top = inverse(scale, cast, value.shape), q.format.max
    low, high = (np.clip(v * factor, -top, top).astype(KINDS[cast.format]) for v in (value - near, value + near))
    found = q.data.view(torch.uint8).numpy()
    certain = low.view(np.uint8) == high.view(np.uint8)
    assert np.array_equal(found[certain], low.view(np.uint8)[certain])
    wide, low, high = (v.astype(np.float32) for v in (found.view(low.dtype), low, high))
    assert ((low <= wide) & (wide <= high)).all()
    plain = near < 1e-4 * np.abs(value)  # where little cancels
    assert ((low != high) & plain).sum() <= 5 + plain.sum() / 100  # else this would prove little


def bits(t: Tensor) -> Tensor:
    """Of a tensor, so that -0 is not 0."""
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("cast", CASTS, ids=name_of)
def test_forward(cast, shape, dtype, residual, bias, center):
    x, added, weight, shift = given(shape, dtype, residual, bias)
    total, q, mean, rstd = norm_quantize(x, added, weight, shift, EPS, cast, center=center)
    assert total.dtype == dtype
    assert torch.equal(bits(total), bits(x if added is None else x + added))
    n = norm64(total.double(), weight.double(), None if shift is None else shift.double(), center)
    mean64, rstd64, size = statistics64(total, center)
    magnitude = size * rstd64 * weight.double().abs() + (0 if shift is None else shift.double().abs())
    assert_rounds_to(q, n, NEAR * magnitude, cast)
    assert (mean.dtype, rstd.dtype) == (torch.float32, torch.float32)
    assert ((mean - mean64).abs() <= NEAR * size.mean(1, keepdim=True)).all()
    assert ((rstd - rstd64).abs() <= NEAR * rstd64).all()
    assert center or not mean.any()


def test_the_sum_has_the_dtype_of_x():
    x, residual = given((17, 130), torch.bfloat16).x, given((17, 130), torch.float32, residual=True).residual
    for one, other in ((x, residual), (residual, x)):
        total = norm_quantize(one, other, torch.ones(130), None, EPS, Cast(), center=False).total
        assert total.dtype == one.dtype
        assert torch.equal(bits(total), bits((one + other).to(one.dtype)))


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.5])
def test_eps_is_under_the_root(eps, center):
    x = given((17, 130), torch.float32).x * torch.logspace(-5, 2, 17).unsqueeze(1)
    rstd = norm_quantize(x, None, torch.ones(130), None, eps, Cast(), center=center).rstd
    rstd64 = statistics64(x, center, eps)[1]
    assert ((rstd - rstd64).abs() <= NEAR * rstd64).all()


@pytest.mark.parametrize("center", [False, True])
def test_eps_is_a_float32(center):
    """As a kernel has it: the difference from the float64 of 1e-5 shows in rows as small as its root."""
    x = torch.randn(2048, 130) * torch.logspace(-8, 0, 2048).unsqueeze(1)
    assert EPS32 != EPS
    one, other = (norm_quantize(x, None, torch.ones(130), None, eps, Cast(), center=center) for eps in (EPS, EPS32))
    assert torch.equal(bits(one.rstd), bits(other.rstd))
    assert torch.equal(bits(one.output.data), bits(other.output.data))


def test_a_row_of_zeros_gives_zeros_under_the_smallest_scale():
    total, q, mean, rstd = norm_quantize(torch.zeros(2, 9), None, torch.ones(9), None, EPS, Cast(), center=False)
    assert not bits(q.data).any()
    assert (q.scale == 2.0**-126).all()
    assert not mean.any()
    assert (rstd == np.float32(EPS32**-0.5)).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (17, 130)], ids=str)
def test_layer_norm_of_constant_rows_is_the_bias(shape):
    x, _, weight, bias = given(shape, torch.float32, bias=True)
    for shift in (bias, None):
        q = norm_quantize(torch.full_like(x, 3.0), None, weight, shift, EPS, Cast(), center=True).output
        value = torch.zeros(shape) if shift is None else shift.expand(shape)
        assert_rounds_to(q, value.double(), torch.zeros(shape), Cast())


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_nan_and_no_other(value, center):
    x, _, weight, _ = given((17, 130), torch.bfloat16)
    broken = x.clone()
    broken[4, 70] = value
    q = norm_quantize(broken, None, weight, None, EPS, Cast(), center=center).output
    clean = norm_quantize(x, None, weight, None, EPS, Cast(), center=center).output
    others = torch.arange(17) != 4
    assert q.scale[4].isnan().all()
    assert q.data[4].float().isnan().all()
    assert torch.equal(bits(q.scale)[others], bits(clean.scale)[others])
    assert torch.equal(bits(q.data)[others], bits(clean.data)[others])


def test_no_rows():
    total, q, mean, rstd = norm_quantize(torch.ones(0, 7), None, torch.ones(7), None, EPS, Cast(), center=True)
    assert (q.data.shape, q.scale.shape, mean.shape, rstd.shape) == ((0, 7), (0, 1), (0, 1), (0, 1))
    dx, dweight, dbias = norm_backward(torch.ones(0, 7), total, torch.ones(7), mean, rstd, None, center=True)
    assert dx.shape == (0, 7)
    assert torch.equal(dweight, torch.zeros(7))
    assert torch.equal(dbias, torch.zeros(7))


# ---- backward


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_backward(shape, dtype, residual, center):
    dn = torch.randn(shape).to(dtype)
    x, beside, weight, _ = given(shape, dtype, residual)
    _, _, mean, rstd = norm_quantize(x, None, weight, None, EPS, Cast(), center=center)
    found = norm_backward(dn, x, weight, mean, rstd, beside, center=center)
    assert [t.dtype for t in found] == [dtype, weight.dtype, weight.dtype]
    assert [t.shape for t in found] == [shape, shape[1:], (shape[1] if center else 0,)]
    required = gradients64(dn, x, weight, beside, center)[: 3 if center else 2]
    magnitudes = gradient_magnitudes(dn, x, weight, center)
    for one, other, size in zip(found, required, magnitudes, strict=False):
        last = torch.finfo(one.dtype).eps / 2 * other.abs()
        assert ((one - other).abs() <= 2 * NEAR * size + last).all()


# ---- the registered operations


def arguments(shape: tuple[int, int], center: bool, device: str = "cpu") -> tuple[tuple, tuple]:
    """Of the two operations; all that is optional is there with `center`, and nothing without."""
    x, residual, weight, bias = given(shape, torch.bfloat16, residual=center, bias=center)
    column = torch.ones(shape[0], 1)
    forward = x, residual, weight, bias, EPS, "e4m3", "pow2", center
    backward = x, x, weight, column, column, residual, center
    return tuple(tuple(v.to(device) if isinstance(v, Tensor) else v for v in v_s) for v_s in (forward, backward))


@pytest.mark.parametrize("center", [False, True])
def test_opcheck(center):
    forward, backward = arguments((5, 70), center)
    torch.library.opcheck(torch.ops.octavo.norm_quantize.default, forward)
    torch.library.opcheck(torch.ops.octavo.norm_backward.default, backward)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("shape", [*SIZES, (0, 7)], ids=str)
def test_shapes_on_the_meta_device(shape, center):
    operations = torch.ops.octavo.norm_quantize, torch.ops.octavo.norm_backward
    for operation, real, fake in zip(
        operations, arguments(shape, center), arguments(shape, center, "meta"), strict=True
    ):
        for one, other in zip(operation(*real), operation(*fake), strict=True):
            assert other.device.type == "meta"
            assert (one.shape, one.dtype, one.is_contiguous()) == (other.shape, other.dtype, other.is_contiguous())


def test_strided_inputs_give_contiguous_results():
    """What is compiled believes the fake's strides."""
    forward, backward = arguments((5, 70), True)
    forward, backward = (
        tuple(v.t().contiguous().t() if isinstance(v, Tensor) and v.shape == (5, 70) else v for v in values)
        for values in (forward, backward)
    )
    results = *torch.ops.octavo.norm_quantize(*forward), *torch.ops.octavo.norm_backward(*backward)
    assert all(t.is_contiguous() for t in results)


def test_strided_inputs_give_the_same_numbers():
    x, residual, weight, _ = given((17, 130), torch.float32, residual=True)
    turned = [t.t().contiguous().t() for t in (x, residual)]
    for center in (False, True):
        one = torch.ops.octavo.norm_quantize(x, residual, weight, None, EPS, "e4m3", "fp32", center)
        other = torch.ops.octavo.norm_quantize(*turned, weight, None, EPS, "e4m3", "fp32", center)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(one, other, strict=True))


# ---- where the kernels run


def kernels_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, module: Any, **operations: Callable[..., Any]
) -> list[tuple[Any, ...]]:
    """Pretend that a CPU runs kernels, these; what they are called with, call by call."""
    calls: list[tuple[Any, ...]] = []

    def recorded(operation: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *values: (calls.append(values), operation(*values))[1]

    kernels = SimpleNamespace(**{name: recorded(operation) for name, operation in operations.items()})
    monkeypatch.setattr("octavo.ops.triton_support.has_kernels", lambda device: True)
    monkeypatch.setattr(module, "kernels_of", lambda operation: kernels)
    return calls


@pytest.mark.parametrize(
    ("shape", "fmt", "ran"),
    [
        ((5, 70), "e4m3", True),
        ((5, 70), "e5m2", True),
        ((5, 70), "e4m3fnuz", False),
        ((5, 70), "e5m2fnuz", False),
        ((1, LONGEST_ROW), "e4m3", True),
        ((1, LONGEST_ROW + 1), "e4m3", False),
        ((0, 7), "e4m3", False),
        ((5, 0), "e4m3", False),
    ],
    ids=str,
)
def test_kernels_run_for_their_formats_and_lengths(shape, fmt, ran, monkeypatch):
    x, weight, row = torch.randn(shape), torch.randn(shape[1]), torch.ones(shape[0], 1)
    operations = {"norm_quantize": reference.norm_quantize, "norm_backward": reference.norm_backward}
    required = norm_quantize(x, x, weight, weight, EPS, Cast(fmt), center=True)
    calls = kernels_on_the_cpu(monkeypatch, op, **operations)
    found = norm_quantize(x, x, weight, weight, EPS, Cast(fmt), center=True)
    assert len(calls) == ran
    assert torch.equal(bits(found.output.data), bits(required.output.data))
    calls.clear()
    norm_backward(x, x, weight, row, row, None, center=True)
    assert len(calls) == (ran or "fnuz" in fmt)


def test_kernels_get_contiguous_tensors_and_a_float32_eps(monkeypatch):
    operations = {"norm_quantize": reference.norm_quantize, "norm_backward": reference.norm_backward}
    calls = kernels_on_the_cpu(monkeypatch, op, **operations)
    x, k, row = torch.randn(70, 5).t(), torch.randn(70, 2)[:, 0], torch.ones(1, 1).expand(5, 1)
    norm_quantize(x, x, k, k, EPS, Cast(), center=True)
    norm_backward(x, x, k, row, row, x, center=True)
    tensors = [value for values in calls for value in values if isinstance(value, Tensor)]
    assert len(tensors) == 4 + 6
    assert all(t.is_contiguous() for t in tensors)
    assert calls[0][4] == EPS32


# ---- what is refused


@pytest.mark.parametrize("cast", REFUSED, ids=str)
def test_casts_that_the_kernels_do_not_do_are_refused(cast):
    x, k, row = torch.ones(3, 6), torch.ones(6), torch.ones(3, 1)
    message = r"takes a cast by row, rounded to nearest, with scale 'fp32' or 'pow2', .*got Cast\(.*: change the cast"
    with pytest.raises(ValueError, match="norm_quantize " + message):
        norm_quantize(x, None, k, None, EPS, cast, center=False)
    with pytest.raises(ValueError, match="recast_norm " + message):
        recast_norm(x, row, row, k, None, row, cast)


def tensors(device: str, **changed: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """For the two operations, with some changed."""
    x, k, row = (torch.ones(shape, device=device) for shape in ((3, 6), (6,), (3, 1)))
    forward = {"x": x, "residual": x, "weight": k, "bias": k}
    backward = {"dn": x, "x": x, "weight": k, "mean": row, "rstd": row, "residual": x}
    changed = {name: t.to(device) for name, t in changed.items()}
    return tuple({name: changed.get(name, t) for name, t in values.items()} for values in (forward, backward))


FLOAT = "torch.float32 or torch.bfloat16 or torch.float16"
BAD = [
    ("x", torch.ones(6), r"a norm takes a matrix of float32, bfloat16 or float16, got torch.float32 \[6\]"),
    ("x", torch.ones(2, 3, 6), r"a norm takes a matrix .*, got torch.float32 \[2, 3, 6\]"),
    ("x", torch.ones(3, 6, dtype=torch.int32), r"a norm takes a matrix .*, got torch.int32 \[3, 6\]"),
    ("x", torch.ones(3, 6).double(), r"a norm takes a matrix .*, got torch.float64 \[3, 6\]"),
    *(("residual", torch.ones(s), rf"residual must be {FLOAT} \[3, 6\], got") for s in ((1, 6), (3, 1), (6,), (4, 6))),
    ("residual", torch.ones(3, 6).long(), rf"residual must be {FLOAT} \[3, 6\], got torch.int64 \[3, 6\]"),
    *(("weight", torch.ones(s), rf"weight must be {FLOAT} \[6\], got") for s in ((5,), (3, 6), (1,), (1, 6))),
    ("weight", torch.ones(6).int(), rf"weight must be {FLOAT} \[6\], got torch.int32 \[6\]"),
    *(("bias", torch.ones(s), rf"bias must be {FLOAT} \[6\], got") for s in ((5,), (1,), (1, 6), (3, 6))),
    ("bias", torch.ones(6).double(), rf"bias must be {FLOAT} \[6\], got torch.float64 \[6\]"),
    *(("dn", torch.ones(s), rf"dn must be {FLOAT} \[3, 6\], got") for s in ((1, 6), (3, 5), (18,))),
    ("dn", torch.ones(3, 6).int(), rf"dn must be {FLOAT} \[3, 6\], got torch.int32 \[3, 6\]"),
    *(
        (name, t, rf"{name} must be torch.float32 \[3, 1\], got")
        for name in ("mean", "rstd")
        for t in (torch.ones(3), torch.ones(1, 1), torch.ones(1, 3), torch.ones(3, 1).bfloat16())
    ),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("name", "tensor", "message"), BAD, ids=lambda v: str(v)[:8])
def test_other_shapes_and_dtypes_are_refused(name, tensor, message, device):
    forward, backward = tensors(device, **{name: tensor})
    if name in forward:
        with pytest.raises(ValueError, match=message):
            norm_quantize(**forward, eps=EPS, cast=Cast(), center=True)
    if name in backward:
        with pytest.raises(ValueError, match=message):
            norm_backward(**backward, center=True)
