"""The scales of the backward GEMMs: checks, the registered operation, and the choice of its implementation."""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.checks import check_tensor, eager_check
from octavo.ops.folded_scales.reference import fold_scales_reference
from octavo.ops.inductor import operation
from octavo.ops.triton_support import has_kernels


class FoldedScales(NamedTuple):
    """Row t of g [T, N] has the scale s_g[t], and row t of x [T, K] the scale s_x[t] = m[t] * 2^e[t]. In dw, the scale
    of their product is c[t] = s_g[t] * 2^e[t].

    Args:
        dx: s_g / m, float32 [T, 1]: the scale of g for dx.
        shift: int32 [T]: c_max / c[t] = 2^shift[t], where c_max is the largest c. dw divides row t of g by it.
        dw: c_max / s_w, float32 [N, 1]: the scale of dw; c_max alone, [1, 1], without s_w.
    """

    dx: Tensor
    shift: Tensor
    dw: Tensor


def fold_scales(s_x: Tensor, s_g: Tensor, s_w: Tensor | None) -> FoldedScales:
    """The scales of the backward GEMMs of one-time quantization (the mathematics: `octavo.nn.linear_function`).

    Args:
        s_x: float32 [T, 1], of the rows of x.
        s_g: float32 [T, 1], powers of two, of the rows of g = dy * s_w * m.
        s_w: float32 [N, 1], of the rows of w; None where g = dy * m.

    Raises:
        ValueError: for another shape or dtype.
    """
    _check(s_x, s_g, s_w)
    return FoldedScales(*_fold_scales(s_x, s_g, s_w))


@eager_check
def _check(s_x: Tensor, s_g: Tensor, s_w: Tensor | None) -> None:
    rows = s_x.numel()
    for name, scale, size in (("s_x", s_x, rows), ("s_g", s_g, rows), ("s_w", s_w, 0 if s_w is None else s_w.numel())):
        check_tensor(name, scale, (size, 1), torch.float32)


def _folds(s_x: Tensor, *rest: Tensor | None) -> bool:
    return s_x.numel() > 0 and has_kernels(s_x.device)


@operation("fold_scales", _folds)
def _fold_scales(s_x: Tensor, s_g: Tensor, s_w: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if not _folds(s_x):
        return fold_scales_reference(s_x, s_g, s_w)
    from octavo.ops.folded_scales import kernel

    return kernel.fold_scales(s_x.contiguous(), s_g.contiguous(), None if s_w is None else s_w.contiguous())


@_fold_scales.register_fake
def _(s_x: Tensor, s_g: Tensor, s_w: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    _check(s_x, s_g, s_w)
    shift = s_x.new_empty(s_x.shape[0], dtype=torch.int32)
    return torch.empty_like(s_g), shift, s_x.new_empty((1, 1) if s_w is None else s_w.shape)
