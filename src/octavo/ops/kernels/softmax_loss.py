"""The cross-entropy as Triton kernels.

For the loss, a program computes one row of logits, block by block. Its second pass, for the gradient, finds most of the
row in the L2 cache: a program has all threads of a multiprocessor. So as many rows are in work as there are
multiprocessors (34 MB of 128,256 logits in BF16 on an H100).

For the gradient in eight bits a program computes a tile, because a column has an amax too.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.formats import E4M3
from octavo.ops.kernels.device_math import inverse, magnitude_bits, scale_from_amax, to_data
from octavo.ops.launching import allocate, cdiv, multiprocessors, power_of_two_above
from octavo.ops.registration import launcher

BLOCK, WARPS = 32768, 32  # the most columns of a program at a time, and its warps then
LOSS_BLOCK, LOSS_WARPS = 8192, 8  # without a gradient: programs that wait for a sum leave room for others


def cross_entropy(
    z: Tensor, labels: Tensor, factor: Tensor | None, lse: Tensor | None, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Same as `cross_entropy_reference`, for contiguous tensors."""
    rows, columns = z.shape
    found, picked = (allocate(z, (rows,), torch.float32) for _ in range(2))
    most, warps = (LOSS_BLOCK, LOSS_WARPS) if factor is None else (BLOCK, WARPS)
    block = min(most, max(power_of_two_above(columns), 128))
    launcher(_cross_entropy_kernel, (rows,))(
        z, labels, factor, lse, found, picked, columns, SCALE=scale, CAP=cap, BLOCK=block,
        num_warps=max(4, warps * block // most),
    )  # fmt: skip
    return found, picked


LOG2_E = tl.constexpr(1.4426950408889634)
INFINITY = tl.constexpr(float("inf"))
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32
IGNORED = tl.constexpr(-(1 << 40))
LEAST = tl.constexpr(2.0**-23)


@triton.jit
def _cross_entropy_kernel(
    z_ptr, labels_ptr, factor_ptr, given_ptr, lse_ptr, picked_ptr, V,
    SCALE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
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
            y, _rest = _logits(tl.load(z_ptr + start + offs, start + offs < V, other=0.0).to(tl.float32), SCALE, CAP)
            y = tl.where(start + offs < V, y, -INFINITY)
            higher = tl.maximum(largest, tl.max(y, 0))
            total = total * tl.exp2((largest - higher) * LOG2_E) + tl.sum(tl.exp2((y - higher) * LOG2_E), 0)
            largest = higher
        lse = largest + tl.log(total)
    tl.store(lse_ptr + t, lse)
    tl.store(picked_ptr + t, picked)
    if factor_ptr is not None:
        factor = _factor(factor_ptr, SCALE, CAP)
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


# ---- The gradient in eight bits. A program computes tiles, because a column has an amax too.


STRIP, TILE_T, TILE_V = 256, 8, 512  # rows of a program over rows, and its tiles
TURNED_T, TURNED_V = 128, 64  # the tile of a program over columns


def cross_entropy_gradient(
    z: Tensor, labels: Tensor, factor: Tensor, lse: Tensor, picked: Tensor, scale: float, cap: float,
    by_row: bool, by_column: bool,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Same as `cross_entropy_gradient_reference`, for contiguous tensors."""
    t, v = z.shape
    data, scales = (allocate(z, (t, v), E4M3.dtype), allocate(z, (t, 1), torch.float32)) if by_row else (None, None)
    bits = allocate(z, (v,), torch.int32, zero=True) if by_column else None
    given, constants = (z, labels, factor, lse, picked), {"SCALE": scale, "CAP": cap, "FORMAT_MAX": E4M3.max}
    launcher(_rows_kernel, (cdiv(v, TILE_V), cdiv(t, STRIP)))(
        *given, data, scales, bits, t, v, **constants,
        STRIP=STRIP, BLOCK_T=TILE_T, BLOCK_V=TILE_V, num_warps=4,
    )  # fmt: skip
    if not by_column:
        return data, scales, None, None
    data_t, scale_t = allocate(z, (v, t), E4M3.dtype), allocate(z, (v, 1), torch.float32)
    launcher(_columns_kernel, (cdiv(v, TURNED_V), cdiv(t, TURNED_T)))(
        *given, bits, data_t, scale_t, t, v, **constants,
        BLOCK_T=TURNED_T, BLOCK_V=TURNED_V, num_warps=4,
    )  # fmt: skip
    return data, scales, data_t, scale_t


@triton.jit
def _rows_kernel(
    z_ptr, labels_ptr, factor_ptr, lse_ptr, picked_ptr, data_ptr, scale_ptr, bits_ptr, T, V,
    SCALE: tl.constexpr, CAP: tl.constexpr, FORMAT_MAX: tl.constexpr,
    STRIP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    factor = _factor(factor_ptr, SCALE, CAP)
    largest = tl.zeros((BLOCK_T, BLOCK_V), tl.int32)
    for start in range(0, STRIP, BLOCK_T):
        first = tl.program_id(1) * STRIP + start
        g, miss = _tile(z_ptr, labels_ptr, lse_ptr, picked_ptr, first, offs_v, T, V, SCALE, CAP, BLOCK_T)
        largest = tl.maximum(largest, magnitude_bits(g))
        if data_ptr is not None:
            offs_t = tl.arange(0, BLOCK_T)
            scale = tl.div_rn(tl.maximum(miss, LEAST), FORMAT_MAX)
            tl.store(scale_ptr + first + offs_t, scale * factor, (first + offs_t < T) & (tl.program_id(0) == 0))
            mask = (first + offs_t < T)[:, None] & (offs_v < V)[None, :]
            q = to_data(g * inverse(scale)[:, None], data_ptr.dtype.element_ty)
            tl.store(data_ptr + first.to(tl.int64) * V + offs_t[:, None] * V + offs_v[None, :], q, mask)
    if bits_ptr is not None:
        amax = tl.max(largest, 0).to(tl.float32, bitcast=True) * factor
        tl.atomic_max(bits_ptr + offs_v, magnitude_bits(amax), offs_v < V)


@triton.jit
def _columns_kernel(
    z_ptr, labels_ptr, factor_ptr, lse_ptr, picked_ptr, bits_ptr, data_ptr, scale_ptr, T, V,
    SCALE: tl.constexpr, CAP: tl.constexpr, FORMAT_MAX: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    first = tl.program_id(1) * BLOCK_T
    offs_t = first + tl.arange(0, BLOCK_T)
    g, _miss = _tile(z_ptr, labels_ptr, lse_ptr, picked_ptr, first, offs_v, T, V, SCALE, CAP, BLOCK_T)
    scale = scale_from_amax(tl.load(bits_ptr + offs_v, offs_v < V, other=0), FORMAT_MAX, False)
    q = to_data(g * (inverse(scale) * _factor(factor_ptr, SCALE, CAP))[None, :], data_ptr.dtype.element_ty)
    mask = (offs_v < V)[:, None] & (offs_t < T)[None, :]
    tl.store(data_ptr + offs_v.to(tl.int64)[:, None] * T + offs_t[None, :], tl.trans(q), mask)
    tl.store(scale_ptr + offs_v, scale, (offs_v < V) & (tl.program_id(1) == 0))


@triton.jit
def _tile(
    z_ptr, labels_ptr, lse_ptr, picked_ptr, first, offs_v, T, V, SCALE: tl.constexpr, CAP: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """g without its factor, of rows from `first` on, and 1 - p of their labels. Zeros outside of the matrix.

    An element takes few instructions: its row's lse is scaled before, and the label's g computed once.
    """
    offs_t = tl.arange(0, BLOCK_T)
    there = first + offs_t < T
    label = tl.load(labels_ptr + first + offs_t, there, other=IGNORED)
    there &= label != IGNORED
    # 2^(y - lse) of a row that is not there is 0
    lse = tl.where(there, tl.load(lse_ptr + first + offs_t, there, other=0.0) * LOG2_E, INFINITY)
    z_ptr += first.to(tl.int64) * V  # a scalar: offsets of int64 for each element would take many registers
    mask = there[:, None] & (offs_v < V)[None, :]
    z = tl.load(z_ptr + offs_t[:, None] * V + offs_v[None, :], mask, other=-INFINITY)
    y, tanh = _logits(z.to(tl.float32), SCALE, CAP)
    g = tl.exp2(y * LOG2_E - lse[:, None])
    own = (label >= 0) & (label < V)
    picked = tl.load(picked_ptr + first + offs_t, own, other=0.0)
    miss = 1.0 - tl.where(own, tl.exp2(picked * LOG2_E - lse), 0.0)
    g_label = -miss
    if CAP != 0:
        g *= 1.0 - tanh * tanh
        g_label *= 1.0 - picked * picked * (1.0 / (CAP * CAP))
    column = tl.where(own, label, -1).to(tl.int32)
    return tl.where(offs_v[None, :] == column[:, None], g_label[:, None], g), miss


@triton.jit
def _factor(factor_ptr, SCALE: tl.constexpr, CAP: tl.constexpr):
    return tl.load(factor_ptr) * (SCALE if CAP == 0 else SCALE * CAP)


# ---- A gradient, multiplied in place.


MULTIPLIED = 8192  # elements of a program at a time


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
