"""The index of the largest number of each row as a Triton kernel: programs take parts of a row, and one their results.

Number and index are one integer of 64 bits: the upper half has the order of the numbers, the lower half falls with the
index. The largest integer is the first of the largest numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.kernels.device_math import wait_for_inputs
from octavo.ops.launching import allocate, cdiv, power_of_two_above
from octavo.ops.registration import launcher

BLOCK_N = 2048


def index_of_largest(x: Tensor) -> Tensor:
    """Same as `index_of_largest_reference`, for a contiguous x."""
    m, n = x.shape
    parts = cdiv(n, BLOCK_N)
    keys, index = allocate(x, (m, parts), torch.int64), allocate(x, (m,), torch.int64)
    launcher(_part_kernel, (m, parts))(x, keys, n, BLOCK_N=BLOCK_N, num_warps=4)
    launcher(_combine_kernel, (m,))(keys, index, parts, BLOCK_N=power_of_two_above(parts), num_warps=4)
    return index


@triton.jit
def _part_kernel(x_ptr, keys_ptr, N, BLOCK_N: tl.constexpr):
    wait_for_inputs()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = part * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + row * N + offs, offs < N, other=float("-inf")).to(tl.float32) + 0.0  # -0 becomes 0
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(x == x, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), 0x7FFFFFFF)
    keys = (order.to(tl.int64) << 32) | (0xFFFFFFFF - offs.to(tl.int64))
    tl.store(keys_ptr + row * tl.num_programs(1) + part, tl.max(keys, 0))


@triton.jit
def _combine_kernel(keys_ptr, index_ptr, N, BLOCK_N: tl.constexpr):
    wait_for_inputs()
    row, offs = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_N)
    keys = tl.load(keys_ptr + row * N + offs, offs < N, other=-(2**63))
    tl.store(index_ptr + row, 0xFFFFFFFF - (tl.max(keys, 0) & 0xFFFFFFFF))
