"""The Hadamard rotation of a layer's input and output, differentiable."""

from typing import Any

import torch
from torch import Tensor

from octavo.ops import rotate


def rotate_activations(x: Tensor) -> Tensor:
    """`octavo.ops.rotate`, with its gradient."""
    y: Tensor = _Rotation.apply(x)  # type: ignore[no-untyped-call]
    return y


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return rotate(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return rotate_activations(dy)  # the rotation is symmetric
