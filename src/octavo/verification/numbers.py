"""The numbers that the bytes of a packed layer stand for, in float32, and the rounding of its inputs.

    w[N,K]  = data * scale, one scale a block          every scale multiplies
    x_q     = e4m3(x / s) * s,  s = amax / 448         amax of the elements that share the scale; 127 for integers
    s       = input_scale if it is stored; 2^ceil(log2(amax / 448)) if scales are powers of two

This module follows docs/format.md and the documentation of compressed-tensors, transformers and ModelOpt, and uses no
code of Octavo that packs.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.verification.layer_spec import LayerSpec

RoundInput = Callable[[Tensor, LayerSpec, Tensor | None], Tensor]
"""x [..., K], the spec of its layer, input_scale or None -> x [..., K] in float32"""


def decode_exponents(stored: Tensor) -> Tensor:
    """Decode E8M0: the byte e + 127 is the scale 2^e, in float32."""
    return torch.exp2(stored.view(torch.uint8).float() - 127)


def scale_values(scale: Tensor, spec: LayerSpec) -> Tensor:
    """The stored scale as float32 [blocks of N, blocks of K]."""
    if spec.exponents or scale.dtype == torch.uint8:
        return decode_exponents(scale)
    values = scale.float()
    if values.ndim == 4:
        return values[:, 0, :, 0]
    if values.numel() == 1:
        return values.reshape(1, 1)
    return values if values.ndim == 2 else values.unsqueeze(1)


def spread(values: Tensor, spec: LayerSpec, shape: Iterable[int]) -> Tensor:
    """The scale of each element [N, K] of a weight, from one scale a block."""
    n, k = shape
    down = values.repeat_interleave(spec.rows or n, 0)[:n]
    return down.repeat_interleave(spec.columns or k, 1)[:, :k]


def widen(data: Tensor, scale: Tensor, spec: LayerSpec) -> Tensor:
    """The weight float32 [N, K] that stored data and scale stand for."""
    return data.float() * spread(scale_values(scale, spec), spec, data.shape)


def round_input(x: Tensor, spec: LayerSpec, input_scale: Tensor | None = None) -> Tensor:
    """The input [..., K] in float32, rounded as the layer rounds it."""
    x = x.float()
    if spec.inputs == "none":
        return x
    if spec.inputs == "static":
        assert input_scale is not None
        return _round(x, input_scale.float().reshape(-1)[0], spec)
    if spec.inputs == "tensor":
        return _round(x, _dynamic_scale(x.abs().amax(), spec), spec)
    size = spec.group or x.shape[-1]
    padded = pad(x, (0, -x.shape[-1] % size))  # the last group may be smaller
    groups = padded.reshape(*x.shape[:-1], -1, size)
    rounded = _round(groups, _dynamic_scale(groups.abs().amax(-1, keepdim=True), spec), spec)
    return rounded.flatten(-2)[..., : x.shape[-1]]


def leave_input(x: Tensor, spec: LayerSpec, input_scale: Tensor | None = None) -> Tensor:
    """The input in float32, not rounded, for a reader that only widens weights."""
    return x.float()


def round_input_by_compressed_tensors(x: Tensor, spec: LayerSpec, input_scale: Tensor | None = None) -> Tensor:
    """The input [..., K] in float32, rounded as compressed-tensors emulates it.

    Its strategy `token` has a scale for each index of the first two dimensions of [B, T, K]. It takes the same two
    dimensions of [T, K], has no dimension left to reduce, and so uses one scale for the tensor. In [B, 1, T, K], as
    in DeepSeek-V3's attention, it reduces T too. Its scale of integers is amax / 127.5, for the range from -128 to 127.
    """
    if spec.inputs == "token" and not spec.group and x.ndim > 3:
        return round_input_by_compressed_tensors(x.flatten(2), spec, input_scale).view(x.shape)
    if spec.inputs == "token" and not spec.group and x.ndim < 3:
        spec = replace(spec, inputs="tensor")
    if not spec.integers or spec.inputs not in ("token", "tensor") or spec.group:
        return round_input(x, spec, input_scale)
    magnitude = x.float().abs()
    scale = (magnitude.amax() if spec.inputs == "tensor" else magnitude.amax(-1, keepdim=True)) / 127.5
    return (x.float() / scale).round().clamp(-128, 127).nan_to_num(0) * scale


def _dynamic_scale(amax: Tensor, spec: LayerSpec) -> Tensor:
    scale = torch.where(amax > 0, amax, torch.ones_like(amax)) / spec.largest
    if not spec.exponents and not spec.pow2_inputs:
        return scale
    mantissa, exponent = torch.frexp(scale)  # 0.5 <= mantissa < 1, so 2^exponent is the next power of two
    return torch.exp2((exponent - (mantissa == 0.5).int()).float())


def _round(x: Tensor, scale: Tensor, spec: LayerSpec) -> Tensor:
    q = (x / scale).clamp(-spec.largest, spec.largest)
    return (q.round() if spec.integers else q.to(torch.float8_e4m3fn).float()) * scale
