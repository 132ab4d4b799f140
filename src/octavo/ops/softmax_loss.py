"""The cross-entropy of rows of logits, and its gradient, written over the products that the logits come from.

    y[t,v] = scale * z[t,v]   or   cap * tanh(scale * z[t,v])      of the products z = x @ w^T of a head
    lse[t] = log sum over v of exp y[t,v]                          loss[t] = lse[t] - y[t,label]
    g[t,v] = factor * (exp(y[t,v] - lse[t]) - [v = label]) * dy/dz

Granite and Cohere scale the logits; Gemma 2 has scale = 1 / cap. The kernel reads z twice: for the maximum and the sum
(Milakov and Gimelshein, arXiv:1805.02867), and for g. All arithmetic is in float32.

In eight bits g is written twice, by rows and, transposed, by columns, and z is read once more for each: cheaper than g
in BF16 between them. The largest magnitude of a row of g is that of its label, 1 - p: the other p sum to it. So the
scale of a row is known before. With a cap it is a bound.
"""

from typing import Any

import torch
from torch import Tensor

from octavo.numerics.formats import E4M3
from octavo.numerics.qtensor import Cast
from octavo.ops.launching import converts, has_kernels
from octavo.ops.quantization import like_quantized, quantize_transposed_reference
from octavo.ops.registration import FLOATS, check_tensor, operation

IGNORED = -(1 << 40)  # the label of a row without a loss: no number of a label minus one of a first row
LEAST = 2.0**-23  # of 1 - p in a scale: where p rounds to 1, the other p are at most this
_ROWS = 64  # of the reference at a time, so that it holds no second tensor of the size of z


def cross_entropy_reference(
    z: Tensor, labels: Tensor, factor: Tensor | None, lse: Tensor | None, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    """The parts of the loss of each row of z [T, V], and with a `factor` the gradient, written over z.

    Args:
        z: products of a head, contiguous.
        labels: int64 [T]; `IGNORED` for a row without a loss, whose gradient is 0. Others outside of 0 to V - 1 are in
            another part of the vocabulary.
        factor: of the gradient, 0-dim float32 (float64 of z in float64); None computes none, and leaves z as it is.
        lse: [T], of all parts of the vocabulary, where z is one. Computed if None.
        scale, cap: the logits are scale * z, or cap * tanh(scale * z) if cap is not 0.

    Returns:
        lse and the logit of the label (0 where it is not here), [T] of the dtype of factor.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    found, picked = (z.new_empty(len(z), dtype=wide) for _ in range(2))
    for start in range(0, len(z), _ROWS):
        rows = slice(start, start + _ROWS)
        y, slope = _logits(z[rows], scale, cap)
        own, column = _own(labels[rows], z)
        found[rows] = torch.logsumexp(y, 1).masked_fill_(labels[rows] == IGNORED, 0.0) if lse is None else lse[rows]
        picked[rows] = torch.where(own, y.gather(1, column)[:, 0], 0.0)
        if factor is not None:
            z[rows] = _gradient(y, slope * factor * (scale * (cap or 1)), labels[rows], found[rows])
    return found, picked


def cross_entropy_gradient_reference(
    z: Tensor, labels: Tensor, factor: Tensor, lse: Tensor, picked: Tensor, scale: float, cap: float,
    by_row: bool, by_column: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient g of `cross_entropy` in e4m3 by row, and its transpose so too, each rounded once.

    Args:
        lse, picked: [T], as `cross_entropy` returns them; lse of all parts of the vocabulary.
        by_row, by_column: if they are wanted.

    Returns:
        Data [T, V] and scale [T, 1] of g, and data [V, T] and scale [V, 1] of its transpose; None if not wanted.
    """
    most = factor * (scale * (cap or 1))
    g, data = torch.empty_like(z, dtype=torch.float32), z.new_empty(z.shape, dtype=E4M3.dtype)
    p = torch.where(_own(labels, z)[0], (picked - lse).exp(), 0.0)
    scales = ((1 - p).clamp(min=LEAST) * most / E4M3.max)[:, None].float()
    for start in range(0, len(z), _ROWS):
        rows = slice(start, start + _ROWS)
        y, slope = _logits(z[rows], scale, cap)
        g[rows] = _gradient(y, slope * most, labels[rows], lse[rows])
        data[rows] = (g[rows] / scales[rows]).to(E4M3.dtype)
    transposed = quantize_transposed_reference(g, Cast(), None, None) if by_column else (None, None)
    return *((data, scales) if by_row else (None, None)), *transposed


def _logits(z: Tensor, scale: float, cap: float) -> tuple[Tensor, Tensor | float]:
    """The logits of products z, in at least float32, and the slope of the cap there."""
    y = z.to(torch.promote_types(z.dtype, torch.float32)) * scale
    if not cap:
        return y, 1.0
    slope = 1 - y.tanh_().square()
    return y.mul_(cap), slope


def _own(labels: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Where the label of a row [T] is a column of z, and the column [T, 1]."""
    return (labels >= 0) & (labels < z.shape[1]), labels.clamp(0, z.shape[1] - 1)[:, None]


def _gradient(y: Tensor, factor: Tensor, labels: Tensor, lse: Tensor) -> Tensor:
    """g of logits y, written over them."""
    own, column = _own(labels, y)
    g = y.sub_(lse[:, None]).exp_().scatter_add_(1, column, -own.to(y.dtype)[:, None])
    return g.mul_(factor).masked_fill_((labels == IGNORED)[:, None], 0.0)


def _check(z: Tensor, labels: Tensor, factor: Tensor | None, lse: Tensor | None, *rest: Any) -> None:
    if z.ndim != 2 or z.dtype not in (*FLOATS, torch.float64) or not z.is_contiguous():
        raise ValueError(f"cross_entropy takes a contiguous matrix of a float dtype, got {z.dtype} {list(z.shape)}")
    wide = torch.promote_types(z.dtype, torch.float32)
    check_tensor("labels", labels, (z.shape[0],), torch.int64)
    check_tensor("factor", factor, (), wide)
    check_tensor("lse", lse, (z.shape[0],), wide)


def _check_gradient(z: Tensor, labels: Tensor, factor: Tensor, lse: Tensor, picked: Tensor, *rest: Any) -> None:
    _check(z, labels, factor, lse)
    check_tensor("picked", picked, tuple(lse.shape), lse.dtype)


def _like(z: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(z.new_empty(z.shape[0], dtype=torch.promote_types(z.dtype, torch.float32)) for _ in range(2))


def _like_gradient(z: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    made: list[Tensor] = []
    for wanted, shape in zip(rest[-2:], (z.shape, z.shape[::-1]), strict=True):  # by row, and transposed
        made += like_quantized(z, shape, Cast()) if wanted else (z.new_empty(0), z.new_empty(0))
    return tuple(made)


cross_entropy = operation(
    check=_check, like=_like, mutates=("z",),
    runs=lambda z, *_: z.numel() > 0 and z.dtype in FLOATS and has_kernels(z.device, (8, 0)),
)(cross_entropy_reference)  # fmt: skip
cross_entropy_gradient = operation(
    check=_check_gradient, like=_like_gradient, runs=lambda z, *_: z.dtype in FLOATS and converts(z, "e4m3")
)(cross_entropy_gradient_reference)


def multiply_reference(x: Tensor, factor: Tensor) -> None:
    """Multiply contiguous x in place by a 0-dim factor. The kernel reads no x where the factor is 1.

    A loss is most often differentiated as it is. To find that out on the host would wait for the GPU.
    """
    x.mul_(factor)


multiply = operation(
    like=lambda x, factor: None, runs=lambda x, factor: x.numel() > 0 and has_kernels(x.device, (8, 0)), mutates=("x",)
)(multiply_reference)
