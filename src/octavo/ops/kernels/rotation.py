"""The Hadamard rotation as a Triton kernel, in one pass: a program holds whole blocks of the rotation in registers.

A stage adds and subtracts the neighbours at even and odd positions, and makes the bit that distinguishes them the
highest bit of the position. So the next bit is the lowest in the next stage, and after as many stages as there are
bits, all are in their places again. Triton moves numbers between threads only where the lowest bit is not within a
thread: three times for a block of 4,096. The sums are those of the reference, in its order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.scaling import block_size
from octavo.ops.launching import LONGEST_ROW, allocate, cdiv
from octavo.ops.registration import launcher

ELEMENTS = 4096  # of a program at least, if the tensor has as many
SHORT = 256  # low bits of a long block: the factor of 256, 1/16, is exact, so the bits are those of one pass


def rotate(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Same as `rotate_reference`, for a contiguous x [..., n]; in `dtype`, by default that of x.

    A block that one program cannot hold is rotated along the low bits of the position, and then along the high ones.
    """
    size = block_size(x.shape[-1])
    if size > LONGEST_ROW:
        low = rotate(x.view(-1, size // SHORT, SHORT), torch.float32)
        high = rotate(low.transpose(1, 2).contiguous(), dtype or x.dtype)
        return high.transpose(1, 2).reshape(x.shape)
    y = allocate(x, x.shape, dtype)
    blocks, at_once = x.numel() // size, max(1, ELEMENTS // size)
    launcher(_rotation_kernel, (cdiv(blocks, at_once),))(
        x, y, blocks, FACTOR=size**-0.5, BITS=size.bit_length() - 1, SIZE=size, BLOCK_M=at_once,
        num_warps=max(4, size // 1024),
    )  # fmt: skip
    return y


@triton.jit
def _rotation_kernel(
    x_ptr, y_ptr, M, FACTOR: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr
):
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs = offs_m[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    mask = (offs_m < M)[:, None]
    x = tl.load(x_ptr + offs, mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(BITS):
        even, odd = tl.split(tl.reshape(x, (BLOCK_M, SIZE // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (BLOCK_M, SIZE))
    tl.store(y_ptr + offs, (x * FACTOR).to(y_ptr.dtype.element_ty), mask)
