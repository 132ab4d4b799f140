"""Convolutions that are matrix products, computed by a recipe: those of size 1, and those of disjoint patches.

    y[B,N,H/p,W/p] = conv(x[B,C,H,W], w[N,C,p,p], stride p)  =  patches[B H/p W/p, C p p] @ w[N, C p p]^T

The rows of the product are the patches of x. Its result is y with the channels last in memory. As in PyTorch, pixels
that fill no patch are left out; with a stride above a size of 1, so are those between.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from octavo.nn.linear import RecipeLayer
from octavo.nn.mixed_class import parts_of

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
IMAGE_CHANNELS = 16  # the most that an image has, or what an autoencoder makes of it


def is_gemm(module: nn.Module) -> bool:
    """Whether `module` is a convolution of PyTorch, converted or not, that is a matrix product."""
    if not isinstance(module, CONVOLUTIONS) or parts_of(type(module))[-1] not in CONVOLUTIONS:
        return False
    sizes = module.kernel_size
    unpadded = module.padding in ("valid", (0,) * len(sizes)) or (module.padding == "same" and math.prod(sizes) == 1)
    fits = all(size in (1, step) for size, step in zip(sizes, module.stride, strict=True))
    return module.groups == 1 and unpadded and fits and all(d == 1 for d in module.dilation)


def reads_image(module: Any) -> bool:
    """Whether a convolution that is a matrix product cuts an image into patches."""
    return math.prod(module.kernel_size) > 1 and int(module.in_channels) <= IMAGE_CHANNELS


def gemm_shape(module: Any) -> tuple[int, int]:
    """N outputs and K inputs of the product."""
    return module.out_channels, module.weight[0].numel()


class PatchConvolution(RecipeLayer):
    """A converted convolution. `octavo.cast_once` does not cache its weight: it is cast in every forward pass."""

    weight: nn.Parameter  # [N, C, *kernel_size]
    bias: nn.Parameter | None
    in_channels: int
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]

    def forward(self, x: Tensor) -> Tensor:
        """y [B, N, ...] of x [B, C, ...], or without the batch of both."""
        rank = len(self.kernel_size)
        if x.ndim not in (rank + 1, rank + 2) or x.shape[-rank - 1] != self.in_channels or self._too_small(x):
            raise ValueError(
                f"the convolution takes [B, {self.in_channels}, *sizes] with sizes of at least "
                f"{list(self.kernel_size)}, got {list(x.shape)}: resize or pad the input"
            )
        batched = x if x.ndim == rank + 2 else x.unsqueeze(0)
        y = self.compute(self._patches(batched), self.weight.flatten(1), self.bias, None).movedim(-1, 1)
        return y if x.ndim == rank + 2 else y.squeeze(0)

    def _too_small(self, x: Tensor) -> bool:
        return any(n < size for n, size in zip(x.shape[-len(self.kernel_size) :], self.kernel_size, strict=True))

    def _patches(self, x: Tensor) -> Tensor:
        """[B, *counts, K] of x [B, C, *sizes]."""
        rank = len(self.kernel_size)
        for i, (size, step) in enumerate(zip(self.kernel_size, self.stride, strict=True)):
            count = (x.shape[2 + 2 * i] - size) // step + 1
            used = x.narrow(2 + 2 * i, 0, (count - 1) * step + size)
            if size < step:  # a size of 1
                used = used[(slice(None),) * (2 + 2 * i) + (slice(None, None, step),)]
            x = torch.unflatten(used, 2 + 2 * i, (count, size))
        counts, sizes = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
        return x.permute(0, *counts, 1, *sizes).flatten(1 + rank)
