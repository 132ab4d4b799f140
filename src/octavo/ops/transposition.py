"""The byte transpose, and the scales of the backward GEMMs that multiply transposed bytes."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.formats import widen
from octavo.numerics.scaling import quotient, scale_exponent, scale_mantissa
from octavo.ops.launching import converts, has_kernels
from octavo.ops.registration import check_tensor, operation

# ---- The byte transpose.
#
# Dividing a row by a power of two changes the exponents of its numbers only. A result below the smallest normal number
# is rounded, once, to nearest even.


def transpose_reference(data: Tensor, shift: Tensor | None, place: Tensor | None = None) -> Tensor:
    """The transpose of `data` [M, K], row m divided by 2^shift[m] first; with `place`, of its rows at their places."""
    if shift is not None:
        factor = torch.exp2(-shift.clamp(max=100).float()).unsqueeze(1)  # 2^-100 of any number here is zero
        data = (widen(data) * factor).to(data.dtype)  # exact in float32, then rounded once
    if place is not None:
        data = placed(data.view(torch.uint8), place).view(data.dtype)
    words = data.view(torch.uint8) if data.element_size() == 1 else data
    return words.t().clone(memory_format=torch.contiguous_format).view(data.dtype)


def placed(x: Tensor, place: Tensor | None) -> Tensor:
    """The rows of `x` [M, K] at their places, as `aligned_groups` gives them; zeros where the number is -1."""
    return x if place is None else F.pad(x, (0, 0, 0, 1))[place]  # -1 is the last row


def transpose(
    data: Tensor, shift: Tensor | None = None, after: Tensor | None = None, place: Tensor | None = None
) -> Tensor:
    """The contiguous transpose [K, M] of an eight-bit matrix `data` [M, K]; [K, M'] with `place`.

    Args:
        data: of an eight-bit format, or, without `shift` and `place`, of float32 scales.
        shift: int32 [M], not negative: row m is divided by 2^shift[m] on the way.
        after: a tensor of the backward pass, which is not read. It keeps compiled code from transposing in the forward
            pass and saving the result: of a sharded weight, that would keep all bytes on every rank.
        place: int32 [M'], the row of data that becomes each column of the result, or -1 for a column of zeros
            (`octavo.ops.aligned_groups`). None takes all rows in order.
    """
    return _transpose(data, shift, place, after)


def _check(data: Tensor, shift: Tensor | None, place: Tensor | None) -> None:
    scales = data.dtype == torch.float32 and shift is None and place is None
    if data.ndim != 2 or not (scales or data.element_size() == 1):
        raise ValueError(f"transpose takes a matrix of an eight-bit format, got {data.dtype} {list(data.shape)}")
    check_tensor("shift", shift, (data.shape[0],), torch.int32)
    check_tensor("place", place, (0 if place is None else place.numel(),), torch.int32)


_transpose = operation(
    check=_check, after=True,
    like=lambda data, shift, place: data.new_empty((data.shape[1], (data if place is None else place).shape[0])),
    runs=lambda data, *rest: data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and converts(data),
)(transpose_reference)  # fmt: skip


# ---- The scales of the backward GEMMs.


def group_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """int32 [rows]: the number of the group of each row; E, the number of groups, for rows beyond the last group."""
    # Inductor of PyTorch 2.11 cannot search in a slice, or searches in the tensor that it is cut from, and removes a
    # clone. The clamp changes nothing, and its result is a tensor of its own.
    offsets = offsets.clamp(min=0)
    every = torch.arange(rows, device=offsets.device, dtype=torch.int32)
    return torch.searchsorted(offsets, every, right=True, out_int32=True)


def fold_scales_reference(
    s_x: Tensor, s_g: Tensor, s_w: Tensor | None, offsets: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of `FoldedScales`."""
    exponent = (scale_exponent(s_x) + scale_exponent(s_g)).view(-1)  # [T] of c
    if offsets is None:
        largest = exponent.amax().view(1, 1) if len(exponent) else exponent.new_zeros(1, 1)
        shift = largest.view(1) - exponent
    else:
        group = group_of_rows(offsets, len(exponent)).long()
        lowest = exponent.new_full((len(offsets) + 1,), -(2**30))  # the last one of rows of no group
        each = lowest.scatter_reduce(0, group, exponent, "amax")
        largest, shift = each[:-1].view(-1, 1, 1), each[group] - exponent
    c_max = torch.exp2(largest.float())
    return quotient(s_g, scale_mantissa(s_x)), shift, c_max if s_w is None else quotient(c_max, s_w)


class FoldedScales(NamedTuple):
    """Row t of g [T, N] has the scale s_g[t], and row t of x [T, K] the scale s_x[t] = m[t] * 2^e[t]. In dw, the scale
    of their product is c[t] = s_g[t] * 2^e[t], the largest of which is c_max; of each group, where there are several.
    """

    dx: Tensor  # s_g / m, float32 [T, 1]: the scale of g for dx
    shift: Tensor  # int32 [T]: c_max / c[t] = 2^shift[t], by which dw divides row t of g
    dw: Tensor  # c_max / s_w, float32 [N, 1] or [E, N, 1]: the scale of dw; c_max alone, [1, 1], without s_w


def fold_scales(s_x: Tensor, s_g: Tensor, s_w: Tensor | None, offsets: Tensor | None = None) -> FoldedScales:
    """The scales of the backward GEMMs of one-time quantization (the mathematics: `octavo.nn.linear_function`).

    s_x [T, 1], s_g [T, 1] and s_w [N, 1] are the float32 scales of the rows of x, of g = dy * s_w * m, and of w. Those
    of g are powers of two. s_w is None where g = dy * m. With groups of rows, which end at `offsets` (int32 [E]), s_w
    is [E, N, 1].
    """
    return FoldedScales(*_fold_scales(s_x, s_g, s_w, offsets))


def _check_scales(s_x: Tensor, s_g: Tensor, s_w: Tensor | None, offsets: Tensor | None) -> None:
    for name, scale in (("s_x", s_x), ("s_g", s_g)):
        check_tensor(name, scale, (s_x.numel(), 1), torch.float32)
    groups = () if offsets is None else (offsets.numel(),)
    check_tensor("offsets", offsets, groups, torch.int32)
    columns = 0 if s_w is None else s_w.shape[-2] if s_w.ndim > 1 else s_w.numel()
    check_tensor("s_w", s_w, (*groups, columns, 1), torch.float32)


def _like_scales(s_x: Tensor, s_g: Tensor, s_w: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    shape = s_w.shape if s_w is not None else (1, 1) if offsets is None else (offsets.shape[0], 1, 1)
    return s_g.new_empty(s_g.shape), s_x.new_empty(s_x.shape[0], dtype=torch.int32), s_x.new_empty(shape)


_fold_scales = operation(
    check=_check_scales, like=_like_scales, runs=lambda s_x, *rest: s_x.numel() > 0 and has_kernels(s_x.device)
)(fold_scales_reference)
