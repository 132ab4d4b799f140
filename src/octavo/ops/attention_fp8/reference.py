"""Causal attention in E4M3 in plain PyTorch: the arithmetic of cuDNN's kernels, on whole matrices. A CPU runs it.

    s = scale * s_q * s_k * q k^T      query t of T sees the keys 0 .. t + S - T        H / G heads share a head of keys
    p = exp(s - max)                   l = sum p        stats = max + log l
    o = (p_q @ v) * s_p * s_v / l      o_q = o / s_v: an average of values, so their scale holds every number of it

    dv = p_q^T @ dO                    p = exp(s - stats), quantized
    ds = p * (dO @ v^T - rowsum(dO * o)) * scale,  quantized to ds_q
    dq = ds_q @ k        dk = ds_q^T @ q

x ≈ x_q * s_x for each tensor, with one scale each. The softmax is that of Dao et al. (arXiv:2205.14135), whose kernels
keep a running maximum, so that they round p otherwise than here. Casts to E4M3 saturate.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.numerics.codec import cast, widen
from octavo.numerics.formats import E4M3


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, scales: Mapping[str, Tensor], p_scale: float, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, T, H, D] of `dtype`, o [B, T, H, D] of E4M3 and stats float32 [B, H, T].

    Args:
        q, k, v: E4M3 [B, H, T, D] and [B, G, S, D].
        scales: float32 [1] of q, k and v.
        p_scale: of the probabilities.
        scale: of q k^T.
    """
    with torch.autocast(q.device.type, enabled=False):  # it would run these products in BF16
        s = _scores(q, k, scales["q"] * scales["k"] * scale)
        top = s.amax(-1, keepdim=True)
        p = (s - top).exp()
        total = p.sum(-1, keepdim=True)
        y = _rounded(p, p_scale) @ _of_heads(v, q) / total  # in units of v's scale
    o = cast(y, E4M3).transpose(1, 2).contiguous()
    return (widen(o) * scales["v"]).to(dtype), o, (top + total.log()).squeeze(-1)


def attend_backward_reference(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    stats: Tensor,
    scales: Mapping[str, Tensor],
    p_scale: float,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq [B, T, H, D], dk and dv [B, S, G, D] of `dtype`, and their largest magnitudes, float32 [3].

    Args:
        dy, o: E4M3 [B, T, H, D].
        scales: float32 [1] of q, k, v, o, dO, dP, dQ, dK and dV.
    """
    shared = q.shape[1] // k.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        p = (_scores(q, k, scales["q"] * scales["k"] * scale) - stats.unsqueeze(-1)).exp()
        g, y = (widen(x).transpose(1, 2) * scales[name] for x, name in ((dy, "dO"), (o, "o")))
        dv = _of_keys(_rounded(p, p_scale).mT @ g, shared)
        dp = g @ _of_heads(v, q).mT * scales["v"] - (g * y).sum(-1, keepdim=True)
        ds = _rounded(p * dp * scale, scales["dP"])
        dq = ds @ _of_heads(k, q) * scales["k"]
        dk = _of_keys(ds.mT @ widen(q), shared) * scales["q"]
    gradients = [x.transpose(1, 2).contiguous() for x in (dq, dk, dv)]
    named = zip(gradients, ("dQ", "dK", "dV"), strict=True)
    rounded = [_rounded(x, scales[name]).to(dtype) for x, name in named]
    return *rounded, torch.stack([x.abs().amax() for x in gradients])  # type: ignore[return-value]


def _scores(q: Tensor, k: Tensor, factor: Tensor) -> Tensor:
    """factor * q k^T [B, H, T, S], -inf where the mask hides a key."""
    tokens, keys = q.shape[2], k.shape[2]
    seen = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).tril(keys - tokens)
    return (widen(q) @ _of_heads(k, q).mT * factor).masked_fill(~seen, -torch.inf)


def _of_heads(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values, widened and repeated for each head of q."""
    return widen(x).repeat_interleave(q.shape[1] // x.shape[1], 1)


def _of_keys(x: Tensor, shared: int) -> Tensor:
    """The sum over the heads that share a head of keys."""
    return x.view(x.shape[0], -1, shared, *x.shape[2:]).sum(2)


def _rounded(x: Tensor, scale: Tensor | float) -> Tensor:
    """x, rounded to a number of E4M3 times the scale."""
    return widen(cast(x / scale, E4M3)) * scale
