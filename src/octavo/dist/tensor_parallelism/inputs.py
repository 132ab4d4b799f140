"""The input of a column-parallel layer: x + residual, its norm if there is one, and the bytes of that."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from octavo.nn.fused import FusedCall, NormSpec
from octavo.numerics.qtensor import QTensor
from octavo.ops import norm_backward, norm_quantize, quantize


class Normed(NamedTuple):
    """x + residual [T, K], its norm (or itself) quantized, and what the norm's backward pass needs."""

    total: Tensor
    output: QTensor
    saved: tuple[Tensor | None, ...]  # x + residual, mean and rstd of the norm, its weight and bias


def normed(
    norm: NormSpec | None,
    x: Tensor,
    residual: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    call: FusedCall,
) -> Normed:
    x, residual = rows(x), rows(residual)
    if norm is None or gamma is None:
        return Normed(x, quantize(x, call.recipe.x), (None,) * 5)
    total, n_q, mean, rstd = norm_quantize(x, residual, gamma, beta, norm.eps, call.recipe.x, center=norm.center)
    return Normed(total, n_q, (total, mean, rstd, gamma, beta))


def input_gradients(
    ctx: Any, dn: Tensor, dtotal: Tensor | None, saved: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients of x, residual, gamma and beta, from those of the norm and of the total."""
    total, mean, rstd, gamma, beta = saved
    if total is None or mean is None or rstd is None or gamma is None:
        return dn.to(ctx.x_dtype).view(ctx.shape), None, None, None
    dx, dgamma, dbeta = norm_backward(dn, total, gamma, mean, rstd, rows(dtotal), center=ctx.norm.center)
    dx = dx.view(ctx.shape)  # one tensor for both: autograd must see that it is the same
    return dx, dx if ctx.has_residual else None, dgamma, None if beta is None else dbeta.to(beta.dtype)


def rows(x: Any) -> Any:
    return None if x is None else x.reshape(-1, x.shape[-1])
