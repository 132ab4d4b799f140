"""Causal attention of one group of heads and its gradient in float64, some queries at a time."""

import torch
from torch import Tensor

ROWS = 1024


def attention64(q: Tensor, k: Tensor, v: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y and dq [H, T, D], dk and dv [T, D], of q and dy [H, T, D] and of the k and v [T, D] that all heads share."""
    wide_q, wide_k, wide_v, wide_dy = (x.double() for x in (q, k, v, dy))
    y, dq, dk, dv = (torch.zeros_like(x) for x in (wide_q, wide_q, wide_k, wide_v))
    scale, tokens = q.shape[2] ** -0.5, q.shape[1]
    places = torch.arange(tokens, device=q.device)
    for head in range(q.shape[0]):
        for begin in range(0, tokens, ROWS):
            rows = slice(begin, min(begin + ROWS, tokens))
            x, g, seen = wide_q[head, rows], wide_dy[head, rows], places <= places[rows, None]
            p = (x @ wide_k.t() * scale).masked_fill(~seen, -torch.inf).softmax(-1)
            y[head, rows] = p @ wide_v
            dv += p.t() @ g
            ds = p * (g @ wide_v.t() - (g * y[head, rows]).sum(-1, keepdim=True)) * scale
            dq[head, rows] = ds @ wide_k
            dk += ds.t() @ x
    return y, dq, dk, dv
