"""Activations with a quantized output, and their quantized gradients.

    swiglu  u = [gate, up] (halves of each row),  h = gate * sigmoid(gate) * up      Shazeer (arXiv:2002.05202)
    geglu   u = [up, gate],  h = up * gelu(gate), in the order of diffusers          Shazeer (arXiv:2002.05202)
    gelu    h = u * (1 + erf(u / sqrt(2))) / 2                                      Hendrycks and Gimpel (1606.08415)

All steps are in float32, each rounded once. exp(x) is computed as 2^(x log2 e), with the exp2 of the device. A GPU has
one instruction for exp2; an exp that is exact to the last bit takes eight. So a CPU and a GPU may quantize an element
to neighbouring codes. A kernel and its reference on one device do not differ. The GPU's instruction flushes subnormal
results to zero, so exp(-u^2 / 2) is zero below u = -13.2.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.formats import cast as cast_to
from octavo.numerics.qtensor import ROW, Cast, QTensor
from octavo.numerics.scaling import scale_mantissa
from octavo.ops.launching import Factors, runs_fused
from octavo.ops.permutation import nonzero
from octavo.ops.quantization import quantize_reference
from octavo.ops.registration import FLOATS, check_row_cast, check_tensor, operation

HALF_SQRT = 2**-0.5
DENSITY = (2 * math.pi) ** -0.5  # the density of the normal distribution at 0
LOG2_E = math.log2(math.e)


def activation_quantize_reference(
    u: Tensor, kind: str, scale: Tensor | None, stored: bool, cast: Cast
) -> tuple[Tensor, Tensor]:
    """Data and scale of h [M, F] from u [M, 2F] (swiglu, geglu) or [M, F] (gelu). The data is None if it is not to be
    `stored`, and the scale is None if one is given, [M, 1]."""
    h = activated(u, kind)
    if scale is not None:
        return cast_to(h * (1 / scale), cast.fmt), None  # type: ignore[return-value]
    data, scale = quantize_reference(h, cast, None, None, None)
    return data if stored else None, scale  # type: ignore[return-value]


def activated(u: Tensor, kind: str) -> Tensor:
    """h, in float32."""
    if kind == "gelu":
        return _gelu(u.float())[0]
    if kind == "geglu":
        up, gate = u.float().chunk(2, 1)
        return _gelu(gate)[0] * up
    gate, up = u.float().chunk(2, 1)
    return gate * _sigmoid(gate) * up


def activation_gradient(dh: Tensor, u: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The gradient of u, and h, both float32."""
    dh = dh.float()
    if kind == "swiglu":
        gate, up = u.float().chunk(2, 1)
        sigmoid = _sigmoid(gate)
        silu = gate * sigmoid
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        return torch.cat((dh * up * slope, dh * silu), 1), silu * up
    if kind == "geglu":
        up, gate = u.float().chunk(2, 1)
        h, cumulative, e = _gelu(gate)
        return torch.cat((dh * h, dh * up * (cumulative + gate * (e * DENSITY))), 1), h * up
    h, cumulative, e = _gelu(u.float())
    return dh * (cumulative + u.float() * (e * DENSITY)), h


def _gelu(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """gelu(u) = max(u, 0) - |u| erfc(|u| / sqrt(2)) / 2, the cumulative normal distribution at u, and exp(-u^2 / 2)."""
    z = u.abs() * HALF_SQRT
    exponent = z * z * -LOG2_E
    e = torch.where(exponent < -126, 0.0, _exp2(exponent))
    half = 0.5 * _erfc(z, e)
    return u.clamp(min=0) - u.abs() * half, torch.where(u < 0, half, 1 - half), e


def activation_backward_reference(
    dh: Tensor, u: Tensor, kind: str, cast: Cast, factors: Factors, h_cast: Cast, h_scale: Tensor, biased: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Data and scale of du times its factors, the data of h as in forward, and the gradients of a bias and weights."""
    du, h = activation_gradient(dh, u, kind)
    given: Any = factors
    column_scale, group, mantissa_of, weight, slot, row = given
    dweight, row_scale, inv_h = du.new_empty(0), scale_mantissa(mantissa_of), 1 / h_scale
    if group is not None:
        column_scale = column_scale[group]
        products = F.pad((dh.float() * h).sum(1), (0, 1))  # the row -1 is zero
        counted = nonzero(weight)
        dweight = products[row] / counted
        kept = (weight / counted).view(-1, 1)[slot]  # 1, but for weights below the least
        row_scale, inv_h = row_scale * kept, inv_h * kept
    data, scale = quantize_reference(du, cast, column_scale, row_scale, None)
    h_data = cast_to(h * inv_h, h_cast.fmt)
    return data, scale, h_data, du.sum(0) if biased else du.new_empty(0), dweight


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + _exp2(x.clamp(min=-80) * -LOG2_E))  # a smaller x would overflow


def _exp2(x: Tensor) -> Tensor:
    """2^x. On a CPU it is rounded from float64: PyTorch's in float32 has other bits at the end of a tensor, where the
    numbers fill no vector, and so a row's bytes would depend on the number of rows."""
    return torch.exp2(x.double()).to(x.dtype) if x.device.type == "cpu" else torch.exp2(x)


def _erfc(z: Tensor, e: Tensor) -> Tensor:
    """1 - erf(z) within 2e-7 for z >= 0, with e = exp(-z^2): Abramowitz and Stegun, 7.1.26."""
    # The erf of a library is not used, since that of Triton and that of PyTorch differ.
    t = 1 / (1 + 0.3275911 * z)
    series = t * 1.061405429 - 1.453152027
    series = t * series + 1.421413741
    series = t * series - 0.284496736
    return (t * series + 0.254829592) * t * e


WIDTHS = {"swiglu": 2, "geglu": 2, "gelu": 1}  # columns of u for each column of h


class ActivationGradient(NamedTuple):
    """The quantized gradient of u, the quantized h of forward, and the gradients of a bias and of weights, or empty."""

    du: QTensor
    h: QTensor
    dbias: Tensor
    dweight: Tensor


def activation_quantize(u: Tensor, kind: str, cast: Cast, scale: Tensor | None = None) -> QTensor:
    """Compute h = activation(u) [M, F] and quantize it by row, in one pass.

    u is float32, bfloat16 or float16. For the kind "gelu" it is [M, F]; for "swiglu" [M, 2F], gate before up; for
    "geglu" [M, 2F], up before gate. GELU is the exact one, not the tanh approximation. The cast is by row, rounded to
    nearest, with scale "fp32" or "pow2", without a relative floor. A given `scale` [M, 1] (float32) is at least as
    large as that of the rows.
    """
    check_row_cast("activation_quantize", cast)
    data, own = _activation_quantize(u, kind, scale, True, cast.spec)
    return QTensor(data, own if scale is None else scale, cast.fmt, ROW)


def activation_scales(u: Tensor, kind: str, cast: Cast) -> Tensor:
    """The scales [M, 1] that `activation_quantize` computes, without the data.

    Where a row of h is cut over several ranks, the largest of their scales is that of the whole row.
    """
    check_row_cast("activation_scales", cast)
    return _activation_quantize(u, kind, None, False, cast.spec)[1]


def activation_backward(
    dh: Tensor, u: Tensor, kind: str, cast: Cast, factors: Factors, *, h_cast: Cast, h_scale: Tensor, biased: bool
) -> ActivationGradient:
    """Compute the gradient through an activation and quantize it by row, in one pass.

    Args:
        dh, u, cast: dh [M, F], u, and the cast of its gradient, as in `activation_quantize`.
        factors: multiplied into that gradient first. Without a group, column_scale is [1, columns of u]. A group needs
            a slot, a row and a weight, which is what `gather_quantize` has multiplied the gradient of its slot by. The
            gradient of a weight is the sum of dh * h over its row, divided by the weight (SonicMoE, arXiv:2512.14080,
            section 3.2); zero for a slot without a row. Where `gather_quantize` took 2^-24 for a smaller weight, du and
            h are multiplied by weight / 2^-24: a weight of zero gives zeros.
        h_cast, h_scale: the cast of h in forward and the scale [M, 1] (float32) that it got. The data of h is computed
            again from these instead of being saved.
        biased: also return the gradient of a bias in u, float32 [columns of u]: the sum of the rows of du, before du is
            multiplied by the scales.
    """
    check_row_cast("activation_backward", cast)
    check_row_cast("activation_backward", h_cast)
    given = dh, u, kind, cast.spec, *factors, h_cast.spec, h_scale, biased
    data, scale, h_data, *others = _activation_backward(*given)
    return ActivationGradient(QTensor(data, scale, cast.fmt, ROW), QTensor(h_data, h_scale, h_cast.fmt, ROW), *others)


def _check(u: Tensor, kind: str, scale: Tensor | None = None, *rest: Any) -> None:
    if kind not in WIDTHS:
        raise ValueError(f"unknown activation {kind!r}: choose one of {', '.join(WIDTHS)}")
    if u.ndim != 2 or u.dtype not in FLOATS or u.shape[1] % WIDTHS[kind]:
        raise ValueError(
            f"{kind} takes a matrix of float32, bfloat16 or float16 whose columns divide by {WIDTHS[kind]}, "
            f"got {u.dtype} {list(u.shape)}"
        )
    check_tensor("scale", scale, (u.shape[0], 1), torch.float32)


def _check_backward(dh: Tensor, u: Tensor, kind: str, cast: Cast, factors: Any, *rest: Any) -> None:
    column_scale, group, mantissa_of, weight, slot, row = factors
    _check(u, kind)
    m, columns = u.shape
    check_tensor("dh", dh, (m, columns // WIDTHS[kind]), *FLOATS)
    check_tensor("group", group, (m,), torch.int32)
    check_tensor("slot", slot, (m,), torch.int32)
    lines, top_k = (1, 1) if group is None else (column_scale.shape[0], row.shape[-1])
    check_tensor("row", row, (m // top_k, top_k), torch.int32)
    check_tensor("weight", weight, (m // top_k, top_k), torch.float32)
    check_tensor("column_scale", column_scale, (lines, columns), torch.float32)
    check_tensor("mantissa_of", mantissa_of, (m, 1), torch.float32)
    check_tensor("h_scale", rest[1], (m, 1), torch.float32)


def _like(u: Tensor, kind: str, scale: Tensor | None, stored: bool, cast: Cast) -> tuple[Tensor, Tensor]:
    data = u.new_empty((u.shape[0], u.shape[1] // WIDTHS[kind]), dtype=cast.fmt.dtype) if stored else u.new_empty(0)
    return data, u.new_empty((u.shape[0], 1), dtype=torch.float32) if scale is None else u.new_empty(0)


def _like_backward(dh: Tensor, u: Tensor, kind: str, cast: Cast, factors: Factors, *rest: Any) -> tuple[Tensor, ...]:
    (h_cast, _, biased), row = rest, factors.row
    du, h = u.new_empty(u.shape, dtype=cast.fmt.dtype), dh.new_empty(dh.shape, dtype=h_cast.fmt.dtype)
    scale, dbias = (u.new_empty(shape, dtype=torch.float32) for shape in ((u.shape[0], 1), u.shape[1] if biased else 0))
    return du, scale, h, dbias, u.new_empty(0 if row is None else row.shape, dtype=torch.float32)


_activation_quantize = operation(
    check=_check, like=_like, runs=lambda u, kind, *rest: runs_fused(u, u.shape[1] // WIDTHS[kind], rest[-1].format)
)(activation_quantize_reference)
_activation_backward = operation(
    check=_check_backward,
    like=_like_backward,
    runs=lambda dh, u, kind, cast, *rest: runs_fused(u, dh.shape[1], cast.format, rest[1].format),
)(activation_backward_reference)
