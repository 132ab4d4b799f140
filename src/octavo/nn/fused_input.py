"""The input of fused layers: x + residual, its norm if there is one, and the bytes of that, forward and backward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from octavo.nn.linear_call import shaped
from octavo.nn.scale_folding import scale_folded
from octavo.numerics.cast import Cast
from octavo.numerics.qtensor import QTensor
from octavo.ops import norm_backward, norm_quantize, quantize, requantize_norm


@dataclass(frozen=True)
class NormSpec:
    """A norm without its parameters: `center` distinguishes LayerNorm from RMSNorm."""

    eps: float
    center: bool

    @property
    def kind(self) -> str:
        """As `octavo.observation.operands.observe` names its output."""
        return "center" if self.center else "norm"


Norm = tuple[NormSpec, Tensor, Tensor | None]  # with weight [K] and bias [K]


@dataclass(frozen=True)
class InputInfo:
    """The facts of an input that the backward pass needs: its norm, shape, dtype, and whether it has a residual."""

    norm: NormSpec | None
    shape: torch.Size
    dtype: torch.dtype
    has_residual: bool

    def bytes_transposed(self, saved: Sequence[Any], scale: Tensor, cast: Cast) -> QTensor:
        """The bytes of the norm's output by their `scale` [T, 1], computed again and transposed, without the scale."""
        assert self.norm is not None
        total, mean, rstd, gamma, beta = saved
        return scale_folded(requantize_norm(total, mean if self.norm.center else None, rstd, gamma, beta, scale, cast))

    def gradients(self, dn: Tensor, dtotal: Tensor | None, saved: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """The gradients of x, residual, gamma and beta.

        Args:
            dn: [T, K], of the norm's output, or of x if there is no norm.
            dtotal: of x + residual.
            saved: of `FusedInput`.
        """
        if self.norm is None:
            return dn.to(self.dtype).view(self.shape), None, None, None
        total, mean, rstd, gamma, beta = saved
        dx, dgamma, dbeta = norm_backward(dn, total, gamma, mean, rstd, rows(dtotal), center=self.norm.center)
        dx = dx.view(self.shape)
        return dx, dx if self.has_residual else None, dgamma, None if beta is None else dbeta.to(beta.dtype)


@dataclass(frozen=True)
class FusedInput:
    """The input of a fused layer.

    Attributes:
        total: x + residual [T, K].
        q: the norm of `total`, or `total` itself if there is none, quantized.
        saved: `total`, mean, rstd, gamma and beta, for the backward pass of the norm; None five times without one.
    """

    total: Tensor
    q: QTensor
    saved: tuple[Tensor | None, ...]
    info: InputInfo

    @classmethod
    def of(
        cls,
        norm: NormSpec | None,
        x: Tensor,
        residual: Tensor | None,
        gamma: Tensor | None,
        beta: Tensor | None,
        cast: Cast,
    ) -> Self:
        """That of x [..., K] and residual [..., K], by `wider_first`; gamma [K] and beta [K] are those of `norm`."""
        info = InputInfo(norm, x.shape, x.dtype, residual is not None)
        x, residual = rows(x), rows(residual)
        if norm is None or gamma is None:
            return cls(x, quantize(x, cast), (None,) * 5, info)
        total, q, mean, rstd = norm_quantize(x, residual, gamma, beta, norm.eps, cast, center=norm.center)
        return cls(total, q, (total, mean, rstd, gamma, beta), info)

    def outputs(self, y: Tensor) -> tuple[Tensor, ...]:
        """y [T, N] as [..., N], and x + residual [..., K] where there is a residual."""
        y = shaped(y, self.info.shape)
        return (y, shaped(self.total, self.info.shape)) if self.info.has_residual else (y,)

    @property
    def source(self) -> tuple[str, list[Tensor]]:
        """The kind and the tensors of `octavo.nn.observer.observe_x`."""
        norm = self.info.norm
        return ("x", [self.total]) if norm is None else (norm.kind, [t for t in self.saved if t is not None])


def wider_first(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x and residual in such an order that the first has the dtype that PyTorch gives their sum."""
    if residual is None or residual.dtype == x.dtype:
        return x, residual
    wide = torch.promote_types(x.dtype, residual.dtype)
    return (residual, x) if residual.dtype == wide else (x.to(wide), residual)


def rows(x: Any) -> Any:
    """x [..., K] as [T, K]; None for None.

    Called within the autograd functions, not before them: x and the residual get the same tensor as their gradient.
    Autograd must see that it is the same, or accumulating into one leaf's gradient would change the other's.
    """
    return None if x is None else x.reshape(-1, x.shape[-1])
