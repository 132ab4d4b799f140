"""What the bytes of a packed layer mean, in plain float32, and how its inputs are rounded.

    w[N,K]  = data * scale, the scale of each block repeated over it      every scale multiplies
    x_q     = e4m3(x / s) * s,  s = amax / 448                            of the elements that share it
    s       = input_scale where it is stored; 2^ceil(log2(amax / 448)) where scales are powers of two

Written from docs/format.md and the pages of compressed-tensors, transformers and ModelOpt, and from no code of ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.verification.layer_spec import Words


def scale_values(scale: Tensor, words: Words) -> Tensor:
    """The scales float32 [blocks of N, blocks of K], from what is stored."""
    if words.exponents or scale.dtype == torch.uint8:
        return torch.exp2(scale.view(torch.uint8).float() - 127)
    values = scale.float()
    if values.ndim == 4:
        return values[:, 0, :, 0]
    return values.reshape(1, 1) if values.numel() == 1 else values if values.ndim == 2 else values.unsqueeze(1)


def spread(values: Tensor, words: Words, shape: Iterable[int]) -> Tensor:
    """The scale of each element of a weight of `shape` [N, K], from one a block."""
    n, k = shape
    down = values.repeat_interleave(words.rows or n, 0)[:n]
    return down.repeat_interleave(words.columns or k, 1)[:, :k]


def widen(data: Tensor, scale: Tensor, words: Words) -> Tensor:
    """The weight float32 [N, K] of its stored data and scale."""
    return data.float() * spread(scale_values(scale, words), words, data.shape)


def round_input(x: Tensor, words: Words, input_scale: Tensor | None = None) -> Tensor:
    """The input [..., K] as the layer sees it once it is rounded: float32, the same shape."""
    x = x.float()
    if words.inputs == "none":
        return x
    if words.inputs == "static":
        assert input_scale is not None
        return _rounded(x, input_scale.float().reshape(-1)[0], words)
    if words.inputs == "tensor":
        return _rounded(x, _input_scale(x.abs().amax(), words), words)
    size = words.group or x.shape[-1]
    padded = pad(x, (0, -x.shape[-1] % size))  # the last part may be smaller
    parts = padded.reshape(*x.shape[:-1], -1, size)
    rounded = _rounded(parts, _input_scale(parts.abs().amax(-1, keepdim=True), words), words)
    return rounded.flatten(-2)[..., : x.shape[-1]]


def leave_input(x: Tensor, words: Words, input_scale: Tensor | None = None) -> Tensor:
    """The input as it is, in float32: what a reader computes from that widens weights alone."""
    return x.float()


def round_input_by_compressed_tensors(x: Tensor, words: Words, input_scale: Tensor | None = None) -> Tensor:
    """`round_input` as compressed-tensors emulates it. Its strategy `token` has a scale for each index of the first two
    dimensions of [B, T, K]; it reads [T, K] alike, finds no dimension left to reduce, and takes one scale for all."""
    if words.inputs == "token" and not words.group and x.ndim < 3:
        words = replace(words, inputs="tensor")
    return round_input(x, words, input_scale)


def _input_scale(amax: Tensor, words: Words) -> Tensor:
    scale = torch.where(amax > 0, amax, torch.ones_like(amax)) / words.largest
    if not words.exponents and not words.pow2_inputs:
        return scale
    mantissa, exponent = torch.frexp(scale)
    return torch.exp2((exponent - (mantissa == 0.5).int()).float())


def _rounded(x: Tensor, scale: Tensor, words: Words) -> Tensor:
    q = (x / scale).clamp(-words.largest, words.largest)
    return (q.round() if words.integers else q.to(torch.float8_e4m3fn).float()) * scale
