"""The cross-entropy of rows of logits, and its gradient, written over the products that the logits come from.

    y[t,v] = scale * z[t,v]   or   cap * tanh(scale * z[t,v])      of the products z = x @ w^T of a head
    lse[t] = log sum over v of exp y[t,v]                          loss[t] = lse[t] - y[t,label]
    g[t,v] = factor * (exp(y[t,v] - lse[t]) - [v = label]) * dy/dz

Granite and Cohere scale the logits; Gemma 2 has scale = 1 / cap. The kernel reads z twice: for the maximum and the sum
(Milakov and Gimelshein, arXiv:1805.02867), and for g. All arithmetic is in float32; g has the dtype of z.

With `fp8`, g comes in e4m3 too, with a scale a row. The largest magnitude of a row is that of its label, 1 - p: the
other p sum to it. So the scale is known before the second pass. With a cap it is a bound.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.numerics.formats import E4M3
from octavo.numerics.qtensor import ROW, QTensor
from octavo.ops.launching import has_kernels
from octavo.ops.registration import FLOATS, check_tensor, operation

IGNORED = -100  # the label of a row without a loss
ELSEWHERE = -1  # the label of a row whose label is in another rank's part of the vocabulary
LEAST = 2.0**-23  # of 1 - p in a scale: where p rounds to 1, the other p are at most this
_WIDE = torch.float32
_ROWS = 64  # of the reference at a time, so that it holds no second tensor of the size of z


def cross_entropy_reference(
    z: Tensor, labels: Tensor, factor: Tensor | None, lse: Tensor | None, scale: float, cap: float, fp8: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """lse and the logit of the label [T], and data and scale of g in e4m3 (None without `fp8`). Writes g over z."""
    wide = torch.promote_types(z.dtype, _WIDE)
    found, picked = (z.new_empty(len(z), dtype=wide) for _ in range(2))
    data = z.new_empty(z.shape, dtype=E4M3.dtype) if fp8 else None
    scales = z.new_empty((len(z), 1), dtype=_WIDE) if fp8 else None
    for start in range(0, len(z), _ROWS):
        rows = slice(start, start + _ROWS)
        y = z[rows].to(wide).mul_(scale)
        slope = None
        if cap:
            slope = 1 - y.tanh_().square()
            y.mul_(cap)
        ignored = labels[rows] == IGNORED
        found[rows] = torch.logsumexp(y, 1).masked_fill_(ignored, 0.0) if lse is None else lse[rows]
        picked[rows] = _logit_of_label(y, labels[rows])
        if factor is not None:
            most = factor * (scale * (cap or 1))
            g = _gradient(y, labels[rows], found[rows]).mul_(most)
            g = (g if slope is None else g.mul_(slope)).masked_fill_(ignored[:, None], 0.0)
            z[rows] = g
            if data is not None and scales is not None:
                p = torch.where(labels[rows] >= 0, (picked[rows] - found[rows]).exp(), 0.0)
                scales[rows] = ((1 - p).clamp(min=LEAST) * most / E4M3.max)[:, None]
                data[rows] = (g.float() / scales[rows]).to(E4M3.dtype)
    return found, picked, data, scales  # type: ignore[return-value]


def _logit_of_label(y: Tensor, labels: Tensor) -> Tensor:
    """The logits of the labels; 0 for rows without one here, NaN for a label that is none."""
    own = (labels >= 0) & (labels < y.shape[1])
    logit = y.gather(1, labels.clamp(0, y.shape[1] - 1)[:, None])[:, 0]
    none = (labels == IGNORED) | (labels == ELSEWHERE)
    return torch.where(own, logit, torch.where(none, 0.0, torch.nan))


def _gradient(y: Tensor, labels: Tensor, lse: Tensor) -> Tensor:
    """softmax(y) - onehot, in the memory of y."""
    own = (labels >= 0) & (labels < y.shape[1])
    g = y.sub_(lse[:, None]).exp_()
    return g.scatter_add_(1, labels.clamp(0, y.shape[1] - 1)[:, None], -own.to(g.dtype)[:, None])


class CrossEntropy(NamedTuple):
    """lse and the logit of the label, each [T] in float32 (float64 of z in float64); g in e4m3 if asked for."""

    lse: Tensor
    picked: Tensor
    g: QTensor | None


def cross_entropy(
    z: Tensor,
    labels: Tensor,
    factor: Tensor | None,
    lse: Tensor | None = None,
    *,
    scale: float = 1.0,
    cap: float = 0.0,
    fp8: bool = False,
) -> CrossEntropy:
    """The parts of the loss of each row of z [T, V], and with a `factor` the gradient, written over z.

    Args:
        z: products of a head, contiguous.
        labels: int64 [T], below V; `IGNORED` for a row without a loss, whose gradient is 0, and `ELSEWHERE` for a row
            whose label is in another part of the vocabulary. Another number gives NaN.
        factor: of the gradient, 0-dim float32 (float64 of z in float64); None computes none, and leaves z as it is.
        lse: [T], of all parts of the vocabulary, where z is one. Computed if None.
        scale, cap: the logits are scale * z, or cap * tanh(scale * z) if cap is not 0.
        fp8: also g in e4m3 by row.
    """
    found, picked, data, scales = _cross_entropy(z, labels, factor, lse, scale, cap, fp8)
    return CrossEntropy(found, picked, QTensor(data, scales, E4M3, ROW) if fp8 else None)


def _check(z: Tensor, labels: Tensor, factor: Tensor | None, lse: Tensor | None, *rest: Any) -> None:
    if z.ndim != 2 or z.dtype not in (*FLOATS, torch.float64) or not z.is_contiguous():
        raise ValueError(f"cross_entropy takes a contiguous matrix of a float dtype, got {z.dtype} {list(z.shape)}")
    wide = torch.promote_types(z.dtype, _WIDE)
    check_tensor("labels", labels, (z.shape[0],), torch.int64)
    check_tensor("factor", factor, (), wide)
    check_tensor("lse", lse, (z.shape[0],), wide)


def _like(z: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, fp8 = rest
    lse = z.new_empty(len(z), dtype=torch.promote_types(z.dtype, _WIDE))
    if not fp8:
        return lse, lse.new_empty(len(z)), z.new_empty(0), z.new_empty(0)
    return lse, lse.new_empty(len(z)), z.new_empty(z.shape, dtype=E4M3.dtype), lse.new_empty((len(z), 1))


def _runs(z: Tensor, *rest: Any) -> bool:
    *_, fp8 = rest
    return z.numel() > 0 and z.dtype in FLOATS and has_kernels(z.device, (8, 9) if fp8 else (8, 0))


_cross_entropy = operation(check=_check, like=_like, runs=_runs, mutates=("z",))(cross_entropy_reference)
