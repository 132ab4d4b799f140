"""The schemes of packed linear layers: the storage of the weight, and the cast of the input when the layer runs.

| scheme | weight | weight_scale | input, when the layer runs |
|---|---|---|---|
| channel | a scale for each output channel | float32 [N, 1] | a scale for each token |
| tensor | one scale | float32 [1] | a scale for each token |
| static | one scale | float32 [1] | one scale, stored beside it: input_scale, float32 [1] |
| block | 128 x 128 blocks | float32 [N / 128, K / 128] | 1 x 128 blocks |
| mx | 32 elements along K, powers of two | uint8 [N, K / 32], the exponent of E8M0 | 32 elements, E8M0 |
| group32, group64, group128 | so many elements along K | float32 [N, K / 32] and so on | as many elements |
| weight | a scale for each output channel | float32 [N, 1] | none: the input stays in BF16 |
| int8 | a scale for each output channel | float32 [N, 1] | a scale for each token |

Weights and inputs are e4m3, and in int8 integers of -127 to 127. Every scale multiplies: w ≈ weight * weight_scale.
`Scheme.group` has the spelling of compressed-tensors (github.com/vllm-project/compressed-tensors,
quantization/quant_args.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octavo.numerics import ROW, TENSOR, Cast, QTensor, group
from octavo.recipe import BLOCK_W, BLOCK_X, MX_GROUPS, ROW_W, ROW_X

_EIGHT_BITS = {"num_bits": 8, "type": "float", "symmetric": True}
_TOKEN = {**_EIGHT_BITS, "strategy": "token", "dynamic": True}
_INTEGERS = {**_EIGHT_BITS, "type": "int"}
_MX = {**_EIGHT_BITS, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}


@dataclass(frozen=True, eq=False)
class Scheme:
    """One way to pack a layer.

    Args:
        name: on the command line.
        weight, inputs: the casts of the weight and of the input; None for an input that stays in high precision.
        format: the name of the file format in compressed-tensors.
        weight_arguments, input_arguments: the casts in the spelling of compressed-tensors.
        static: the scale of the input is stored, and not computed when the layer runs.
    """

    name: str
    weight: Cast
    inputs: Cast | None
    format: str
    weight_arguments: Mapping[str, Any]
    input_arguments: Mapping[str, Any] | None
    static: bool = False

    def group(self, targets: Sequence[str]) -> dict[str, Any]:
        """The entry of `config_groups` for the layers `targets`."""
        return {
            "targets": list(targets),
            "weights": {**self.weight_arguments, "dynamic": False},
            "input_activations": None if self.input_arguments is None else dict(self.input_arguments),
            "output_activations": None,
            "format": self.format,
        }

    def misfit(self, n: int, k: int) -> str:
        """The reason why a weight [N, K] cannot be packed by this scheme, or ""."""
        rows, cols = self.weight.granularity.rows or 1, self.weight.granularity.cols or 1
        if n % rows or k % cols:
            return f"[{n}, {k}] is no multiple of {rows} x {cols}, the blocks of {self.name}"
        return ""

    def unreadable(self, n: int, k: int) -> str:
        """The reason why a weight [N, K] of this scheme cannot be read, or "". The last blocks of 128 x 128 may be
        smaller in the files of other programs."""
        return "" if (self.weight.granularity.rows or 1) > 1 else self.misfit(n, k)

    def stored_scale(self, q: QTensor) -> Tensor:
        """The scale of a packed weight in the form that files have."""
        if self.weight.granularity == TENSOR:
            return q.scale.reshape(1)
        return q.scale.view(torch.uint8) if self.weight.scale == "e8m0" else q.scale

    def packed_weight(self, data: Tensor, scale: Tensor) -> QTensor:
        """The weight [N, K] of what lies in a file; a tensor's scale by row, where the input's are by row."""
        if self.static:
            return QTensor(data, scale.unsqueeze(1), self.weight.fmt, TENSOR)
        if self.weight.granularity == TENSOR:
            return QTensor(data, scale.repeat_interleave(len(data)).unsqueeze(1), self.weight.fmt, ROW)
        scale = scale.view(torch.float8_e8m0fnu) if self.weight.scale == "e8m0" else scale
        return QTensor(data, scale, self.weight.fmt, self.weight.granularity)

    def empty_scale(self, n: int, k: int) -> Tensor:
        if self.weight.granularity == TENSOR:
            return torch.empty(1)
        shape = self.weight.granularity.scale_shape((n, k))
        return torch.empty(shape, dtype=torch.uint8 if self.weight.scale == "e8m0" else torch.float32)


CHANNEL = Scheme("channel", ROW_W, ROW_X, "float-quantized", {**_EIGHT_BITS, "strategy": "channel"}, _TOKEN)
TENSORWISE = Scheme(
    "tensor", Cast(granularity=TENSOR), ROW_X, "float-quantized", {**_EIGHT_BITS, "strategy": "tensor"}, _TOKEN
)
BLOCK = Scheme(
    "block", BLOCK_W, BLOCK_X, "float-quantized",
    {**_EIGHT_BITS, "strategy": "block", "block_structure": [128, 128]},
    {**_EIGHT_BITS, "strategy": "group", "group_size": 128, "dynamic": True},
)  # fmt: skip
# DeepSeek's scale_fmt "ue8m0": the scales of inputs are powers of two as well. It is read and not written.
BLOCK_POW2 = replace(BLOCK, name="block, pow2 inputs", inputs=replace(BLOCK_X, scale="pow2"))
# compressed-tensors calls the format of weights alone so.
WEIGHT = Scheme("weight", ROW_W, None, "naive-quantized", {**_EIGHT_BITS, "strategy": "channel"}, None)
_INT8 = Cast("int8", ROW)
INT8 = Scheme(
    "int8", _INT8, _INT8, "int-quantized",
    {**_INTEGERS, "strategy": "channel"}, {**_INTEGERS, "strategy": "token", "dynamic": True},
)  # fmt: skip
STATIC_INPUTS = Cast(granularity=TENSOR)
STATIC = Scheme(
    "static", Cast(granularity=TENSOR), STATIC_INPUTS, "float-quantized",
    {**_EIGHT_BITS, "strategy": "tensor"}, {**_EIGHT_BITS, "strategy": "tensor", "dynamic": False}, static=True,
)  # fmt: skip
MX = Scheme("mx", MX_GROUPS, MX_GROUPS, "mxfp8-quantized", _MX, {**_MX, "dynamic": True})


def _groups(size: int) -> Scheme:
    cast, arguments = Cast(granularity=group(size)), {**_EIGHT_BITS, "strategy": "group", "group_size": size}
    return Scheme(f"group{size}", cast, cast, "float-quantized", arguments, {**arguments, "dynamic": True})


GROUPS = tuple(_groups(size) for size in (32, 64, 128))

# Weights alone with the scales of `tensor` and `block`: read and not written by `pack`.
WEIGHT_ONLY = tuple(
    replace(WEIGHT, name=f"weight, {each.name}", weight=each.weight, weight_arguments=each.weight_arguments)
    for each in (TENSORWISE, BLOCK)
)

SCHEMES = {scheme.name: scheme for scheme in (CHANNEL, TENSORWISE, STATIC, BLOCK, MX, *GROUPS, WEIGHT, INT8)}
# Those that fused kernels take: inputs are cast by row or not at all, and no scale varies along the sum.
FUSED = (CHANNEL.name, INT8.name, WEIGHT.name)
# Recipe of a run -> the scheme whose forward pass repeats the run's bit for bit. For tensorwise the weights agree, and
# the inputs get a scale for each token.
SCHEME_OF = {
    "rowwise": "channel", "rowwise_dw_bf16": "channel", "blockwise": "block", "mxfp8": "mx", "groupwise": "group64",
    "delayed": "static", "tensorwise": "tensor",
}  # fmt: skip
# The dtypes of packed weights.
WEIGHT_DTYPES = tuple(dict.fromkeys(scheme.weight.fmt.dtype for scheme in SCHEMES.values()))


def get_scheme(name: str) -> Scheme:
    """The scheme of that name; a ValueError names the choices."""
    if name not in SCHEMES:
        raise ValueError(f"unknown scheme {name!r}: choose one of {', '.join(SCHEMES)}")
    return SCHEMES[name]
