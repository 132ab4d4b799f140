"""The index of the largest number of each row as a Triton kernel: a program takes a row.

Number and index are one integer of 64 bits: the upper half has the order of the numbers, the lower half falls with the
index. The largest integer is the first of the largest numbers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.kernels.device_math import await_inputs
from octavo.ops.launching import allocate, begins_early, power_of_two_above
from octavo.ops.registration import launcher

MAX_BLOCK_N = 16384


def index_of_largest(x: Tensor) -> Tensor:
    """Same as `index_of_largest_reference`, for a contiguous x."""
    m, n = x.shape
    index = allocate(x, (m,), torch.int64)
    block_n = min(MAX_BLOCK_N, power_of_two_above(n))
    launcher(_largest_kernel, (m,))(
        x, index, n, BLOCK_N=block_n, EARLY=begins_early(x.device, m), num_warps=max(4, min(32, block_n // 512))
    )
    return index


@triton.jit
def _largest_kernel(x_ptr, index_ptr, N, BLOCK_N: tl.constexpr, EARLY: tl.constexpr):
    await_inputs(EARLY)
    x_ptr += tl.program_id(0).to(tl.int64) * N
    largest = tl.full((BLOCK_N,), -(2**63), tl.int64)
    for start in tl.range(0, N, BLOCK_N, num_stages=3):
        offs = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + offs, offs < N, other=float("-inf")).to(tl.float32) + 0.0  # -0 becomes 0
        bits = x.to(tl.int32, bitcast=True)
        order = tl.where(x == x, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), 0x7FFFFFFF)
        largest = tl.maximum(largest, (order.to(tl.int64) << 32) | (0xFFFFFFFF - offs.to(tl.int64)))
    tl.store(index_ptr + tl.program_id(0), 0xFFFFFFFF - (tl.max(largest, 0) & 0xFFFFFFFF))
