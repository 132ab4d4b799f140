"""Low-rank adapters around frozen layers (LoRA), in the passes of `octavo.nn.fused`.

    u[T,R] = n @ A[R,K]^T               A of layers with one input stacked: q, k, v have one product, and gate, up
    y[T,N] = n_q @ w_q^T + u @ B[N,R]^T           B block-diagonal over these layers, times alpha / r
    dn     = g_q @ wT_q^T + du @ A,  du = dy @ B
    dA     = du^T @ n;  dB = dy^T @ u

Adapters read tensors that are there anyway. A norm without a mean is linear in its input, n = x * rstd * gamma, so A *
gamma reads the residual stream x, which the norm saves. The last layer of an MLP quantizes its input h, and its adapter
reads these bytes, which the backward pass of the activation computes again. That pass gives dy of gate and up in eight
bits only, for dx, and their adapters read these. So adapters add R saved numbers a token for the backward pass.

The products of adapters run in the dtype of the layer, as under autocast; their sums are float32.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.nn.module_tools import Adapter
from octavo.nn.parallel_weights import GatheredWeight
from octavo.numerics.qtensor import QTensor

# ---- The adapters of layers with one input, stacked.


def is_frozen(layer: Any) -> bool:
    """True if no parameter of the layer is trained, and each is whole on this rank."""
    tensors = [t for t in (layer.weight, layer.bias) if t is not None]
    return not any(t.requires_grad or isinstance(t, GatheredWeight) or hasattr(t, "device_mesh") for t in tensors)


def reads(adapters: Sequence[Sequence[Adapter]], norm: tuple[Any, ...] | None, dtype: torch.dtype) -> bool:
    """True if the adapters, if there are any, can read the input of a `Norm` in `dtype`. They cannot with the mean of
    a layer norm, nor in float16, which the products of the residual stream may exceed."""
    centered = norm is not None and norm[0].center
    return not any(adapters) or not (centered or dtype == torch.float16)


Pair = tuple[Tensor | None, Tensor | None]  # A [R, K] and B [sum of N, R] of stacked layers; None twice for no adapters
NO_PAIR: Pair = (None, None)


def stack_adapters(layers: Sequence[Sequence[Adapter]], weights: Sequence[Tensor], dtype: torch.dtype) -> Pair:
    """The pair of layers with these weights [N, K], in `dtype` and differentiable."""
    if not any(layers):
        return NO_PAIR
    blocks = []
    for adapters, w in zip(layers, weights, strict=True):
        columns = [(each.b * each.scale).to(dtype) for each in adapters]
        blocks.append(torch.cat(columns, 1) if columns else w.new_empty((w.shape[0], 0), dtype=dtype))
    a = torch.cat([each.a.to(dtype) for adapters in layers for each in adapters])
    return a, blocks[0] if len(blocks) == 1 else torch.block_diag(*blocks)  # type: ignore[no-untyped-call]


# ---- The products with A and B. Without adapters A and B are None, and so are the results.


def read_input(x: Tensor, saved: Sequence[Tensor | None], a: Tensor | None) -> Tensor | None:
    """u [T, R] of the norm of x [T, K] that was `saved` (`octavo.nn.fused.FusedInput`), or of x without a norm."""
    if a is None:
        return None
    _, _, rstd, gamma, _ = saved
    if rstd is None or gamma is None:
        return x.to(a.dtype) @ a.t()  # [T,K] @ [R,K]^T
    return ((x.to(a.dtype) @ (a * gamma).to(a.dtype).t()) * rstd).to(a.dtype)


def read_gradient(du: Tensor | None, x: Tensor | None, saved: Sequence[Tensor]) -> Tensor | None:
    """dA [R, K] of `read_input`; x is None with a norm."""
    if du is None:
        return None
    if x is not None:
        return du.t() @ x.to(du.dtype)  # [T,R]^T @ [T,K]
    total, _, rstd, gamma, _ = saved
    return ((du * rstd).to(du.dtype).t() @ total.to(du.dtype) * gamma).to(du.dtype)


def output_gradients(dy: Tensor, u: Tensor | None, b: Tensor | None) -> Pair:
    """du [T, R] and dB [N, R] of dy [T, N]."""
    return NO_PAIR if u is None or b is None else (dy @ b, dy.t() @ u)  # [T,N] @ [N,R], [T,N]^T @ [T,R]


def read_bytes(q: QTensor, a: Tensor | None) -> Tensor | None:
    """u [T, R] of q [T, K] by row, from its bytes."""
    if a is None:
        return None
    if q.format.name == "e4m3":
        return ops.weight_only_mm(a, q).t().contiguous()  # ([R,K] @ [T,K]^T)^T
    return (q.data.to(a.dtype) @ a.t() * q.scale).to(a.dtype)  # [T,K] @ [R,K]^T


def bytes_gradient(q: QTensor, du: Tensor | None) -> Tensor | None:
    """dA [R, K] of `read_bytes`: the scales of q multiply du."""
    return None if du is None else (du * q.scale).to(du.dtype).t() @ q.data.to(du.dtype)  # [T,R]^T @ [T,K]


def bytes_output_gradients(g: QTensor, s_w: Tensor, u: Tensor | None, b: Tensor | None) -> Pair:
    """`output_gradients` of the bytes of dy * s_w [N, 1]^T."""
    if u is None or b is None:
        return NO_PAIR
    du = read_bytes(g, (b / s_w).to(b.dtype).t().contiguous())
    by_row = bytes_gradient(g, u)
    return du, None if by_row is None else (by_row.t() / s_w).to(b.dtype)


def add(y: Tensor, u: Tensor | None, b: Tensor | None) -> None:
    """y [T, N] += u [T, R] @ B [N, R]^T."""
    if u is not None and b is not None:
        ops.add_product(y, u, b)
