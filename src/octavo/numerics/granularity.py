"""Granularity is the shape of the scale: how many elements share one.

A tensor is cut into blocks, and each block has one scale. The scale has as many dimensions as the tensor. The size of
each dimension is the number of blocks along it. The last block may be shorter than the others.

    tensor        one block             x[M,K]  scale[1, 1]
    row           1 x K                         scale[M, 1]             (a token of x, an output channel of w)
    group:G       1 x G                         scale[M, ceil(K/G)]     (along the reduction; block:1x128 is group:128)
    block:RxC     R x C                         scale[ceil(M/R), ceil(K/C)]

A layer also needs its matrices transposed, and the granularity decides how many quantizations that takes
(`octavo.recipe`). Scales of the tensor or of square blocks transpose with the bytes. A row scale of the transposed
matrix varies along the reduction, so it must be folded into the other operand. Groups must be quantized again along the
other axis.
"""

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Granularity:
    """The block of elements that shares one scale: `rows` x `cols` of the last two dimensions, None for all of them.

    `octavo.numerics` has the usual ones: `ROW`, `TENSOR`, `group(128)` and `block(128, 128)`.

    Raises:
        ValueError: a size below 1, or several rows over all columns.
    """

    rows: int | None
    cols: int | None

    def __post_init__(self) -> None:
        for size in (self.rows, self.cols):
            if size is not None and size < 1:
                raise ValueError(f"a block needs at least one row and one column, got {self.rows} x {self.cols}")
        if (self.rows is None) != (self.cols is None) and self.rows != 1:
            raise ValueError(f"only one row can span all columns, got a block of {self.rows} x {self.cols}")

    def __eq__(self, other: object) -> bool:  # by number, not as tuples: torch.compile traces it faster by far
        return isinstance(other, Granularity) and self.rows == other.rows and self.cols == other.cols

    @property
    def name(self) -> str:
        """The name that `parse_granularity` reads."""
        if self.rows is None and self.cols is None:
            return "tensor"
        if self.rows == 1:
            return "row" if self.cols is None else f"group:{self.cols}"
        return f"block:{self.rows}x{self.cols}"

    @property
    def transposes(self) -> bool:
        """Whether the scale of the transposed matrix is the transposed scale (one quantization serves both)."""
        return self.rows == self.cols

    @property
    def outer(self) -> bool:
        """Whether the scale is constant along the reduction (the last axis), so that a GEMM can apply it outside."""
        return self.cols is None

    def block(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The block's size in each dimension of a tensor of `shape`."""
        if self.rows is None and self.cols is None:
            return tuple(max(n, 1) for n in shape)
        cols = self.cols or max(shape[-1], 1)
        return ((*(1,) * (len(shape) - 2), self.rows or 1) if len(shape) > 1 else ()) + (cols,)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scale of a tensor of `shape`: the number of blocks along each dimension."""
        if self.rows == 1 and self.cols is None:
            return *shape[:-1], 1
        whole = self.cols is None  # an empty row, or an empty tensor, still has a scale
        sizes = (*shape[:-1], max(shape[-1], 1)) if whole and shape else shape
        sizes = (1,) * len(shape) if self.rows is None else sizes
        return tuple(-(-n // b) for n, b in zip(sizes, self.block(shape), strict=True))

    def amax(self, x: Tensor) -> Tensor:
        """The largest magnitude in each block of `x`, in the scale's shape; NaN for a block that holds NaN."""
        if self.rows == 1 and self.cols is None:
            return torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))  # abs would make a copy
        block = self.block(tuple(x.shape))
        cut = _cut(x.abs(), block)
        return cut.amax(dim=tuple(range(1, cut.ndim, 2)))

    def expand(self, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        """`scale` repeated so that it broadcasts against a tensor of `shape`."""
        for axis, (n, b) in enumerate(zip(shape, self.block(shape), strict=True)):
            if scale.shape[axis] != 1 and b > 1:
                scale = scale.repeat_interleave(b, dim=axis).narrow(axis, 0, n)
        return scale


def _cut(x: Tensor, block: tuple[int, ...]) -> Tensor:
    """`x` padded with zeros to whole blocks and viewed as [n0, b0, n1, b1, ...]."""
    padding = [p for n, b in zip(reversed(x.shape), reversed(block), strict=True) for p in (0, -n % b)]
    if any(padding):
        x = F.pad(x, padding)
    return x.reshape([s for n, b in zip(x.shape, block, strict=True) for s in (n // b, b)])


TENSOR = Granularity(None, None)
ROW = Granularity(1, None)


def group(size: int) -> Granularity:
    """Each `size` elements along the reduction share a scale."""
    return Granularity(1, size)


def block(rows: int, cols: int) -> Granularity:
    """Each block of `rows` x `cols` elements shares a scale."""
    return Granularity(rows, cols)


def parse_granularity(name: str) -> Granularity:
    """The granularity called `name`: "tensor", "row", "group:64", "block:128x128"."""
    if name == "tensor":
        return TENSOR
    if name == "row":
        return ROW
    if match := re.fullmatch(r"group:(\d+)", name):
        return group(int(match[1]))
    if match := re.fullmatch(r"block:(\d+)x(\d+)", name):
        return block(int(match[1]), int(match[2]))
    raise ValueError(f"unknown granularity {name!r}: choose tensor, row, group:G (G = 32 to 128) or block:RxC")
