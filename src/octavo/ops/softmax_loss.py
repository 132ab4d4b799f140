"""The cross-entropy of rows of logits, and its gradient, written over the products that the logits come from.

    y[t,v] = scale * z[t,v]   or   cap * tanh(scale * z[t,v])      of the products z = x @ w^T of a head
    lse[t] = log sum over v of exp y[t,v]                          loss[t] = lse[t] - y[t,label]
    g[t,v] = factor * (exp(y[t,v] - lse[t]) - [v = label]) * dy/dz

Granite and Cohere scale the logits; Gemma 2 has scale = 1 / cap. The kernel reads z twice: for the maximum and the sum
(Milakov and Gimelshein, arXiv:1805.02867), and for g. All arithmetic is in float32.

The largest magnitude of a row of g is that of its label, 1 - p: the other p sum to it. So the scale of g in eight bits
is known before the second pass. With a cap it is a bound.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.numerics.formats import E4M3
from octavo.ops.launching import has_kernels
from octavo.ops.registration import FLOATS, check_tensor, operation

IGNORED = -(1 << 40)  # the label of a row without a loss: no number of a label minus one of a first row
LEAST = 2.0**-23  # of 1 - p in a scale: where p rounds to 1, the other p are at most this
_ROWS = 64  # of the reference at a time, so that it holds no second tensor of the size of z


def cross_entropy_reference(
    z: Tensor, labels: Tensor, factor: Tensor | None, lse: Tensor | None, scale: float, cap: float, fp8: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The parts of the loss of each row of z [T, V], and with a `factor` the gradient, written over z.

    Args:
        z: products of a head, contiguous.
        labels: int64 [T]; `IGNORED` for a row without a loss, whose gradient is 0. Others outside of 0 to V - 1 are in
            another part of the vocabulary.
        factor: of the gradient, 0-dim float32 (float64 of z in float64); None computes none, and leaves z as it is.
        lse: [T], of all parts of the vocabulary, where z is one. Computed if None.
        scale, cap: the logits are scale * z, or cap * tanh(scale * z) if cap is not 0.
        fp8: also give g in e4m3 by row.

    Returns:
        lse and the logit of the label (0 where it is not here), [T] of the dtype of factor; data and scale of g in
        e4m3, None without `fp8`.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    found, picked = (z.new_empty(len(z), dtype=wide) for _ in range(2))
    data = z.new_empty(z.shape, dtype=E4M3.dtype) if fp8 else None
    scales = found.new_empty((len(z), 1), dtype=torch.float32) if fp8 else None
    for start in range(0, len(z), _ROWS):
        rows = slice(start, start + _ROWS)
        own, ignored = (labels[rows] >= 0) & (labels[rows] < z.shape[1]), labels[rows] == IGNORED
        column = labels[rows].clamp(0, z.shape[1] - 1)[:, None]
        y = z[rows].to(wide).mul_(scale)
        slope = 1 - y.tanh_().square() if cap else 1.0
        y *= cap or 1
        found[rows] = torch.logsumexp(y, 1).masked_fill_(ignored, 0.0) if lse is None else lse[rows]
        picked[rows] = torch.where(own, y.gather(1, column)[:, 0], 0.0)
        if factor is None:
            continue
        most = factor * (scale * (cap or 1))
        g = y.sub_(found[rows, None]).exp_().scatter_add_(1, column, -own.to(wide)[:, None])
        z[rows] = g.mul_(most * slope).masked_fill_(ignored[:, None], 0.0)
        if data is not None and scales is not None:
            p = torch.where(own, (picked[rows] - found[rows]).exp(), 0.0)
            scales[rows] = ((1 - p).clamp(min=LEAST) * most / E4M3.max)[:, None]
            data[rows] = (g.float() / scales[rows]).to(E4M3.dtype)
    return found, picked, data, scales  # type: ignore[return-value]


def _check(z: Tensor, labels: Tensor, factor: Tensor | None, lse: Tensor | None, *rest: Any) -> None:
    if z.ndim != 2 or z.dtype not in (*FLOATS, torch.float64) or not z.is_contiguous():
        raise ValueError(f"cross_entropy takes a contiguous matrix of a float dtype, got {z.dtype} {list(z.shape)}")
    wide = torch.promote_types(z.dtype, torch.float32)
    check_tensor("labels", labels, (z.shape[0],), torch.int64)
    check_tensor("factor", factor, (), wide)
    check_tensor("lse", lse, (z.shape[0],), wide)


def _like(z: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse, picked = (z.new_empty(z.shape[0], dtype=torch.promote_types(z.dtype, torch.float32)) for _ in range(2))
    if not rest[-1]:
        return lse, picked, z.new_empty(0), z.new_empty(0)
    return lse, picked, z.new_empty(z.shape, dtype=E4M3.dtype), z.new_empty((z.shape[0], 1), dtype=torch.float32)


def _runs(z: Tensor, *rest: Any) -> bool:
    return z.numel() > 0 and z.dtype in FLOATS and has_kernels(z.device, (8, 9) if rest[-1] else (8, 0))


cross_entropy = operation(check=_check, like=_like, runs=_runs, mutates=("z",))(cross_entropy_reference)


def multiply_reference(x: Tensor, factor: Tensor) -> None:
    """Multiply contiguous x in place by a 0-dim factor. The kernel reads no x where the factor is 1.

    A loss is most often differentiated as it is. To find that out on the host would wait for the GPU.
    """
    x.mul_(factor)


multiply = operation(
    like=lambda x, factor: None, runs=lambda x, factor: x.numel() > 0 and has_kernels(x.device, (8, 0)), mutates=("x",)
)(multiply_reference)
