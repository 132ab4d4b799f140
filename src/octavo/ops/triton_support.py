"""What the Triton kernels share on the host's side: when they can run, and the sizes of their tiles.

Triton comes with the CUDA builds of torch; nothing here imports it before a CUDA tensor asks for a kernel.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.granularity import ROW, TENSOR

FORMATS = ("e4m3", "e5m2")  # what Triton's conversions round and saturate as the twins do
LONGEST_ROW = 32768  # elements that one program holds in registers
HAS_TRITON = find_spec("triton") is not None  # looked for here: the compiler cannot trace the search


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels run on `device`: NVIDIA from Ada (8.9), the first to convert to eight bits."""
    if device.type != "cuda" or torch.version.hip is not None or not HAS_TRITON:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def kernels_of(operation: str) -> ModuleType:
    """The Triton kernels of an operation of ours, imported when the first CUDA tensor asks for them."""
    return import_module(f"octavo.ops.{operation}.kernel")


def power_of_two_above(n: int) -> int:
    """The smallest power of two that is at least `n`: the sizes of Triton's tiles."""
    return 1 << max(n - 1, 0).bit_length()


def row_tile(k: int) -> tuple[int, int, int]:
    """(elements, rows, warps) of a program over rows of `k` elements, as measured best on an H100."""
    block = max(power_of_two_above(k), 16)
    rows = max(1, 4096 // block)
    return block, rows, 8 if block <= 8192 else block // 1024


def converts(x: Tensor, *formats: str) -> bool:
    """Whether kernels on `x`'s device convert to these formats, and `x` has something to convert."""
    return x.numel() > 0 and all(fmt in FORMATS for fmt in formats) and has_kernels(x.device)


def runs_fused(x: Tensor, columns: int, *formats: str) -> bool:
    """Whether the fused kernels run for `x`: on its device, over rows of `columns` elements, to these formats."""
    return columns <= LONGEST_ROW and converts(x, *formats)


def fits(how: Cast, columns: int) -> bool:
    """Whether a program's registers hold the rows, of `columns` elements, or the blocks of this cast."""
    if how.granularity == TENSOR:
        return not how.relative_floor
    if how.granularity == ROW:
        return columns <= LONGEST_ROW and not (how.relative_floor and how.scale == "e8m0")
    rows, cols = how.granularity.rows or 1, how.granularity.cols or 1
    return not how.relative_floor and power_of_two_above(rows) * power_of_two_above(cols) <= LONGEST_ROW
