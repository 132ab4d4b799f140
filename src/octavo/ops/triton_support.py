"""When the Triton kernels can run, and the sizes of their tiles.

Triton comes with the CUDA builds of PyTorch. Only the modules whose names end in `kernel` import it. The operations
import these inside functions, when the first CUDA tensor comes.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from octavo.numerics.cast import Cast
from octavo.numerics.granularity import TENSOR
from octavo.ops.gpu_architecture import NVIDIA, GpuArchitecture, Place

FORMATS = frozenset(("e4m3", "e5m2"))  # those that Triton's conversions round and saturate as PyTorch's do
LONGEST_ROW = 32768  # elements that one program can hold in registers
HAS_TRITON = find_spec("triton") is not None  # found at import: torch.compile cannot trace the search


@cache
def has_kernels(device: Place, lowest: tuple[int, int] = (8, 9)) -> bool:
    """Whether Triton kernels run on `device`: NVIDIA GPUs from the compute capability `lowest`. Most kernels need Ada
    (8.9), the first that converts to eight bits."""
    if isinstance(device, GpuArchitecture):
        return device in NVIDIA and device.lowest >= lowest
    if device.type != "cuda" or torch.version.hip is not None or not HAS_TRITON:
        return False
    return torch.cuda.get_device_capability(device) >= lowest


@cache
def some_gpu_rounds_twice() -> bool:
    """Whether a GPU here is an Ada (8.9), for which Triton 3.6 converts float32 to FP8 through float16."""
    return any(torch.cuda.get_device_capability(i) == (8, 9) for i in range(torch.cuda.device_count()))


@cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a GPU. The cache saves the search for its properties, at every launch."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def shared_memory(device: torch.device) -> int:
    """The bytes of shared memory that one program may have on a GPU."""
    properties: Any = torch.cuda.get_device_properties(device)
    size: int = properties.shared_memory_per_block_optin
    return size


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. (`triton.cdiv` takes microseconds, since it serves kernels too.)"""
    return -(-a // b)


def power_of_two_above(n: int) -> int:
    """The smallest power of two that is at least `n`: Triton's tiles have such sizes."""
    return 1 << max(n - 1, 0).bit_length()


def row_tile(k: int) -> tuple[int, int, int]:
    """(BLOCK_K, BLOCK_M, warps) of a program over rows of `k` elements: the fastest on an H100."""
    block = max(power_of_two_above(k), 16)
    rows = max(1, 4096 // block)
    return block, rows, 8 if block <= 8192 else block // 1024


def converts(x: Tensor, *formats: str) -> bool:
    """Whether the kernels run on `x`'s device and convert to these formats, and `x` is not empty."""
    return x.numel() > 0 and FORMATS.issuperset(formats) and has_kernels(x.device)


def runs_fused(x: Tensor, columns: int, *formats: str) -> bool:
    """Whether the fused kernels run on `x`'s device, over rows of `columns` elements, to these formats."""
    return columns <= LONGEST_ROW and converts(x, *formats)


def quantizes_rows(x: Tensor, columns: int, fmt: str) -> bool:
    """Whether the kernels that quantize rows of `columns` elements to the format `fmt` run on `x`'s device. int8 needs
    no conversion to FP8, so an Ampere runs it too."""
    if fmt == "int8":
        return x.numel() > 0 and columns <= LONGEST_ROW and has_kernels(x.device, (8, 0))
    return runs_fused(x, columns, fmt)


def fits(cast: Cast, columns: int) -> bool:
    """Whether the registers of a program hold the rows (of `columns` elements) or the blocks of this cast."""
    if cast.granularity == TENSOR:
        return not cast.relative_floor
    if cast.by_row:
        return columns <= LONGEST_ROW and not (cast.relative_floor and cast.scale == "e8m0")
    rows, cols = cast.granularity.rows or 1, cast.granularity.cols or 1
    return not cast.relative_floor and power_of_two_above(rows) * power_of_two_above(cols) <= LONGEST_ROW
