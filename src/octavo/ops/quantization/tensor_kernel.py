"""Quantization by a scale of the whole tensor: its own, or one known beforehand."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.formats import Format
from octavo.ops.device_math import INFINITY_BITS, NAN_BITS, amax_bits, inverse, scale_from_amax, store_scale
from octavo.ops.inductor import launcher
from octavo.ops.launching import allocate
from octavo.ops.quantization.device_rounding import round_to_data
from octavo.ops.triton_support import cdiv

BLOCK = 8192  # elements of a program


def quantize_tensor(x: Tensor, data: Tensor, scale: Tensor, cast: Cast, seed: Tensor | None) -> None:
    bits = x.new_zeros(1, dtype=torch.int32)
    grid = (cdiv(x.numel(), BLOCK),)
    launcher(_amax_kernel, grid)(x, bits, x.numel(), BLOCK=BLOCK, num_warps=8)
    launcher(_tensor_kernel, grid)(
        x, data, scale, bits, seed, x.numel(),
        FORMAT_MAX=cast.fmt.max, POWER_OF_TWO=cast.power_of_two, E8M0=cast.scale == "e8m0",
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _amax_kernel(x_ptr, bits_ptr, numel, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, offs < numel, other=0.0).to(tl.float32)
    tl.atomic_max(bits_ptr, amax_bits(x, 0))


@triton.jit
def _tensor_kernel(
    x_ptr, data_ptr, scale_ptr, bits_ptr, seed_ptr, numel,
    FORMAT_MAX: tl.constexpr, POWER_OF_TWO: tl.constexpr, E8M0: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    scale = scale_from_amax(tl.load(bits_ptr + tl.arange(0, 1)), FORMAT_MAX, POWER_OF_TWO)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, offs < numel, other=0.0).to(tl.float32)
    tl.store(
        data_ptr + offs, round_to_data(x * inverse(scale), data_ptr.dtype.element_ty, offs, seed_ptr), offs < numel
    )
    store_scale(scale_ptr + tl.arange(0, 1), scale, tl.program_id(0) + tl.arange(0, 1) == 0, E8M0)


def quantize_scaled(x: Tensor, scale: Tensor, fmt: Format, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Same as `quantize_scaled_reference`, for a contiguous x [M, K]. A second launch stores NaN if x is not finite."""
    data = allocate(x, x.shape, fmt.dtype)
    bits = x.new_zeros((1, 1), dtype=torch.int32)
    grid = (cdiv(x.numel(), BLOCK),)
    launcher(_scaled_kernel, grid)(
        x, data, scale, bits, seed, x.numel(), FORMAT_MAX=fmt.max, BLOCK=BLOCK, num_warps=8
    )  # fmt: skip
    launcher(_poison_kernel, (min(grid[0], 132),))(data, bits, x.numel(), BLOCK=BLOCK, num_warps=8)
    return data, bits.view(torch.float32)


@triton.jit
def _scaled_kernel(
    x_ptr, data_ptr, scale_ptr, bits_ptr, seed_ptr, numel, FORMAT_MAX: tl.constexpr, BLOCK: tl.constexpr
):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, offs < numel, other=0.0).to(tl.float32)
    tl.atomic_max(bits_ptr, amax_bits(x, 0))
    x = tl.minimum(tl.maximum(x * tl.div_rn(1.0, tl.load(scale_ptr)), -FORMAT_MAX), FORMAT_MAX)
    tl.store(data_ptr + offs, round_to_data(x, data_ptr.dtype.element_ty, offs, seed_ptr), offs < numel)


@triton.jit
def _poison_kernel(data_ptr, bits_ptr, numel, BLOCK: tl.constexpr):
    if tl.load(bits_ptr) >= INFINITY_BITS:
        nan = tl.full((BLOCK,), NAN_BITS, tl.int32).to(tl.float32, bitcast=True).to(data_ptr.dtype.element_ty)
        for block in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
            offs = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            tl.store(data_ptr + offs, nan, offs < numel)
