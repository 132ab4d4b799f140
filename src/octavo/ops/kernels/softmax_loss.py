"""The cross-entropy as a Triton kernel: a program computes one row of logits, block by block.

The second pass finds most of the row in the L2 cache: a program has all threads of a multiprocessor. So as many rows
are in work as there are multiprocessors (34 MB of 128,256 logits in BF16 on an H100).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.formats import E4M3
from octavo.ops.kernels.device_math import to_data
from octavo.ops.launching import allocate, cdiv, multiprocessors, power_of_two_above
from octavo.ops.registration import launcher

BLOCK, WARPS = 32768, 32  # the most columns of a program at a time, and its warps then
MULTIPLIED = 8192  # elements of a program of `multiply` at a time


def cross_entropy(
    z: Tensor, labels: Tensor, factor: Tensor | None, lse: Tensor | None, scale: float, cap: float, fp8: bool
) -> tuple[Any, Any, Any, Any]:
    """Same as `cross_entropy_reference`, for contiguous tensors."""
    rows, columns = z.shape
    found, picked = (allocate(z, (rows,), torch.float32) for _ in range(2))
    data = allocate(z, (rows, columns), E4M3.dtype) if fp8 else None
    scales = allocate(z, (rows, 1), torch.float32) if fp8 else None
    block = min(BLOCK, max(power_of_two_above(columns), 128))
    launcher(_cross_entropy_kernel, (rows,))(
        z, labels, factor, lse, found, picked, data, scales, columns,
        SCALE=scale, CAP=cap, SLOPE=scale * (cap or 1.0), FORMAT_MAX=E4M3.max, BLOCK=block,
        num_warps=max(4, WARPS * block // BLOCK),
    )  # fmt: skip
    return found, picked, data, scales


LOG2_E = tl.constexpr(1.4426950408889634)
INFINITY = tl.constexpr(float("inf"))
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32
IGNORED = tl.constexpr(-(1 << 40))
LEAST = tl.constexpr(2.0**-23)


@triton.jit
def _cross_entropy_kernel(
    z_ptr, labels_ptr, factor_ptr, given_ptr, lse_ptr, picked_ptr, data_ptr, scale_ptr, V,
    SCALE: tl.constexpr, CAP: tl.constexpr, SLOPE: tl.constexpr, FORMAT_MAX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + t)
    z_ptr += t * V
    offs = tl.arange(0, BLOCK)
    own = (label >= 0) & (label < V)
    picked, _tanh = _logits(tl.load(z_ptr + label, own, other=0.0).to(tl.float32), SCALE, CAP)
    lse = tl.full((), 0.0, tl.float32)
    if given_ptr is not None:
        lse = tl.load(given_ptr + t)
    elif label != IGNORED:
        largest = LOWEST  # finite: a first block of masked logits is no NaN then
        total = 0.0
        for start in range(0, V, BLOCK):
            y, tanh = _logits(tl.load(z_ptr + start + offs, start + offs < V, other=0.0).to(tl.float32), SCALE, CAP)
            y = tl.where(start + offs < V, y, -INFINITY)
            higher = tl.maximum(largest, tl.max(y, 0))
            total = total * tl.exp2((largest - higher) * LOG2_E) + tl.sum(tl.exp2((y - higher) * LOG2_E), 0)
            largest = higher
        lse = largest + tl.log(total)
    tl.store(lse_ptr + t, lse)
    tl.store(picked_ptr + t, picked)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr) * SLOPE
        inv = factor
        if data_ptr is not None:
            p = tl.where(own, tl.exp2((picked - lse) * LOG2_E), 0.0)
            scale = tl.maximum(1.0 - p, LEAST) * factor / FORMAT_MAX
            tl.store(scale_ptr + t, scale)
            inv = 1.0 / scale
        tl.debug_barrier()  # no thread writes over the label's product before all have read it
        for start in range(0, V, BLOCK):
            mask = start + offs < V
            y, tanh = _logits(tl.load(z_ptr + start + offs, mask, other=0.0).to(tl.float32), SCALE, CAP)
            g = tl.exp2((y - lse) * LOG2_E)
            g = tl.where(start + offs == label, g - 1.0, g) * factor
            if CAP != 0:
                g *= 1.0 - tanh * tanh
            g = tl.where(label == IGNORED, 0.0, g)
            tl.store(z_ptr + start + offs, g.to(z_ptr.dtype.element_ty), mask)
            if data_ptr is not None:
                tl.store(data_ptr + t * V + start + offs, to_data(g * inv, data_ptr.dtype.element_ty), mask)


@triton.jit
def _logits(z, SCALE: tl.constexpr, CAP: tl.constexpr):
    """The logits of products z, and tanh of the scaled ones (z itself without a cap)."""
    y = z * SCALE
    if CAP != 0:
        e = tl.exp2(tl.abs(y) * (-2.0 * LOG2_E))  # of a number that is not positive
        tanh = (1.0 - e) / (1.0 + e)
        z = tl.where(y < 0.0, -tanh, tanh)
        y = z * CAP
    return y, z


def multiply(x: Tensor, factor: Tensor) -> None:
    """Same as `multiply_reference`."""
    programs = min(cdiv(x.numel(), MULTIPLIED), 8 * multiprocessors(x.device))
    launcher(_multiply_kernel, (programs,))(x, factor, x.numel(), BLOCK=MULTIPLIED, num_warps=8)


@triton.jit
def _multiply_kernel(x_ptr, factor_ptr, N, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        for block in range(tl.program_id(0), tl.cdiv(N, BLOCK), tl.num_programs(0)):
            offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + offs, offs < N).to(tl.float32) * factor
            tl.store(x_ptr + offs, x.to(x_ptr.dtype.element_ty), offs < N)
