"""Causal attention of many queries in E4M3, forward and backward.

A GPU runs it in cuDNN. The reference computes the arithmetic of its kernels, on whole matrices:

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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.numerics.formats import E4M3, cast, widen
from octavo.ops.dispatch import GRADIENT_TILE, fp8_attention_limit
from octavo.ops.launching import P_SCALE, Heads
from octavo.ops.registration import check_tensor, operation

# |ds| reaches about a fifth of this many times scale * amax(dO) * amax(v) (docs/decisions.md), so that none saturates.
DS_LIMIT = 1.75


class Attended(NamedTuple):
    """A result of `fp8_attention`, and what its gradient needs."""

    y: Tensor  # [B, H, T, D], a view of contiguous [B, T, H, D]
    o: Tensor  # E4M3 [B, T, H, D]: y ≈ o * v_scale
    stats: Tensor  # float32 [B, H, T]: the logarithm of the sum of each softmax


def fp8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    *,
    scale: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Attended:
    """Causal attention of the last T tokens of a text to its S tokens, in E4M3.

    Products are of E4M3 numbers, and sums float32. The probabilities are rounded to E4M3, and so is the result, with
    the scale of v: it is an average of values. On a GPU it runs in cuDNN, and no call waits for the device. A CPU
    computes the same in plain PyTorch, and so does a GPU for one query, which cuDNN does not take.

    Args:
        q, k, v: float8_e4m3fn [B, H, T, D] and [B, G, S, D], with S at least T, and H a multiple of G.
        q_scale, k_scale, v_scale: float32, one element each, multiplied into the numbers.
        scale: multiplied into q @ k^T; 1 / sqrt(D) by default.
        dtype: of y.

    Raises:
        RuntimeError: the GPU, its libraries or the head size do not have FP8 attention.
    """
    factor = q.shape[3] ** -0.5 if scale is None else float(scale)
    y, o, stats = _fp8_attention(q, k, v, q_scale, k_scale, v_scale, factor, dtype)
    return Attended(y.transpose(1, 2), o, stats)


def fp8_attention_backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    stats: Tensor,
    dy_scale: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    out_scales: Tensor,
    *,
    scale: float | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of `fp8_attention`: dq [B, H, T, D], dk and dv [B, G, S, D] of `dtype`, and their largest magnitudes
    before they were rounded, float32 [3].

    Args:
        dy: float8_e4m3fn [B, T, H, D], contiguous, with the scale `dy_scale`.
        q, k, v, o, stats, q_scale, k_scale, v_scale, scale: arguments and results of `fp8_attention`.
        out_scales: float32 [3] of dq, dk and dv, which are rounded to E4M3 with them. Larger numbers saturate.

    Raises:
        RuntimeError: as `fp8_attention`; also on a GPU, unless T and S are equal and a multiple of `GRADIENT_TILE`.
    """
    _check_scales(q_scale, k_scale, v_scale)
    check_tensor("out_scales", out_scales, (3,), torch.float32)
    factor = q.shape[3] ** -0.5 if scale is None else float(scale)
    scales = torch.cat([x.view(1) for x in (q_scale, k_scale, v_scale, dy_scale)] + [out_scales])
    dq, dk, dv, amax = _fp8_attention_backward(dy, q, k, v, o, stats, scales, factor, dtype)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), amax


def attend_reference(
    heads: Heads, scales: Mapping[str, Tensor], scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, T, H, D] of `dtype`, o [B, T, H, D] of E4M3 and stats float32 [B, H, T].

    `scales` are float32 [1] of q, k and v, and `scale` multiplies q k^T.
    """
    q, k, v = heads
    with torch.autocast(q.device.type, enabled=False):  # it would run these products in BF16
        s = _scores(q, k, scales["q"] * scales["k"] * scale)
        top = s.amax(-1, keepdim=True)
        p = (s - top).exp()
        total = p.sum(-1, keepdim=True)
        y = _rounded(p, P_SCALE) @ _of_heads(v, q) / total  # in units of v's scale
    o = cast(y, E4M3).transpose(1, 2).contiguous()
    return (widen(o) * scales["v"]).to(dtype), o, (top + total.log()).squeeze(-1)


def attend_backward_reference(
    dy: Tensor, heads: Heads, o: Tensor, stats: Tensor, scales: Mapping[str, Tensor], scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq [B, T, H, D], dk and dv [B, S, G, D] of `dtype`, and their largest magnitudes, float32 [3].

    dy and o are E4M3 [B, T, H, D], and `scales` those of q, k, v, o, dO, dP, dQ, dK and dV.
    """
    q, k, v = heads
    shared = q.shape[1] // k.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        p = (_scores(q, k, scales["q"] * scales["k"] * scale) - stats.unsqueeze(-1)).exp()
        g, y = (widen(x).transpose(1, 2) * scales[name] for x, name in ((dy, "dO"), (o, "o")))
        dv = _of_keys(_rounded(p, P_SCALE).mT @ g, shared)
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
    return widen(x).repeat_interleave(q.shape[1] // x.shape[1], 1)


def _of_keys(x: Tensor, shared: int) -> Tensor:
    """The sum over the heads that share a head of keys."""
    return x.view(x.shape[0], -1, shared, *x.shape[2:]).sum(2)


def _rounded(x: Tensor, scale: Tensor | float) -> Tensor:
    return widen(cast(x / scale, E4M3)) * scale


def _check_scales(*scales: Tensor) -> None:
    for name, s in zip(("q_scale", "k_scale", "v_scale"), scales, strict=True):
        if s.numel() != 1 or s.dtype != torch.float32:
            raise ValueError(f"{name} must be float32 with one element, got {s.dtype} {list(s.shape)}")


def _check(heads: Heads, *rest: Any) -> None:
    _check_heads(*heads)
    _check_scales(*rest[:3])


def _check_backward(dy: Tensor, heads: Heads, o: Tensor, stats: Tensor, *rest: Any) -> None:
    _check_heads(*heads)
    batch, count, tokens, dim = heads.q.shape
    check_tensor("dy", dy, (batch, tokens, count, dim), E4M3.dtype)
    check_tensor("o", o, tuple(dy.shape), E4M3.dtype)
    check_tensor("stats", stats, (batch, count, tokens), torch.float32)


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    batch, heads, tokens, dim = q.shape if q.ndim == 4 else (0, 0, 0, 0)
    kv_heads, keys = (k.shape[1], k.shape[2]) if k.ndim == 4 else (0, 0)
    if not heads or not kv_heads or heads % kv_heads or not 0 < tokens <= keys:
        raise ValueError(
            "q must be [B, H, T, D], and k and v [B, G, S, D] with S >= T > 0 and H a multiple of G, got "
            f"{list(q.shape)} and {list(k.shape)}"
        )
    check_tensor("q", q, tuple(q.shape), E4M3.dtype)
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x, (batch, kv_heads, keys, dim), E4M3.dtype)


def _by_token(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, T, H, D] like x [B, H, T, D]."""
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), dtype=dtype)


def _like(heads: Heads, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    q = heads.q
    return _by_token(q, rest[-1]), _by_token(q, q.dtype), q.new_empty(q.shape[:3], dtype=torch.float32)


def _like_backward(dy: Tensor, heads: Heads, *rest: Any) -> tuple[Tensor, ...]:
    return *(_by_token(x, rest[-1]) for x in heads), dy.new_empty(3, dtype=torch.float32)


@operation(check=_check, like=_like, repeats=lambda *_: False)
def _fp8_attention(
    heads: Heads, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    scales = {"q": q_scale.view(1), "k": k_scale.view(1), "v": v_scale.view(1)}
    rows = Heads(*(x if x.stride(-1) == 1 else x.contiguous() for x in heads))
    values: Any = rows, scales, scale, dtype
    # cuDNN 9.19 leaves one query to its kernels for Ampere, which have no FP8.
    if not _runs_cudnn(heads.q) or heads.q.shape[2] == 1:
        return attend_reference(*values)
    from octavo.ops.kernels import attention_fp8 as kernel

    return kernel.attend(*values)


@operation(check=_check_backward, like=_like_backward, repeats=lambda *_: False)
def _fp8_attention_backward(
    dy: Tensor, heads: Heads, o: Tensor, stats: Tensor, scales: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    named = dict(zip(("q", "k", "v", "dO", "dQ", "dK", "dV"), (s.view(1) for s in scales.unbind()), strict=True))
    named["o"] = named["v"]
    named["dP"] = named["dO"] * named["v"] * (DS_LIMIT * E4M3.max * scale)
    values: Any = dy, heads, o, stats, named, scale, dtype
    if not _runs_cudnn(heads.q):
        return attend_backward_reference(*values)
    tokens, keys = heads.q.shape[2], heads.k.shape[2]
    if tokens % GRADIENT_TILE or keys != tokens:
        raise RuntimeError(
            f"the gradient of FP8 attention needs as many keys as queries, and a multiple of {GRADIENT_TILE} on a GPU, "
            f"got {tokens} queries and {keys} keys: take attention in BF16"
        )
    from octavo.ops.kernels import attention_fp8 as kernel

    return kernel.attend_backward(*values)


def _runs_cudnn(q: Tensor) -> bool:
    if q.device.type == "cpu":
        return False
    if limit := fp8_attention_limit(q.device, q.shape[3], training=True):
        raise RuntimeError(f"{limit}: take attention in BF16")
    return True
