"""The choice of the implementation that a scaled GEMM runs on. One function decides, and reports call it too.

PyTorch's `scaled_mm` has these kernels. `dispatch.json` records each with its source (octavo.ops.gemm.dispatch):

    scales                     GPU
    tensor                     cuBLASLt from Ada (8.9), hipBLASLt from MI300
    row                        cuBLASLt on Hopper; CUTLASS on Ada and Blackwell; hipBLASLt from MI300
    1x128, 128x128 blocks      cuBLASLt on Hopper (9.x) only
    MX: groups of 32, E8M0     cuBLASLt from Blackwell (10.0), hipBLASLt on MI350

A Triton kernel of ours computes what PyTorch lacks on NVIDIA GPUs from Ada on: scales in groups of 32, 64 or 128, and
1x128 with 128x128 blocks, float32 or E8M0. With groups of 32 and 64 and a large M, scaling the partial sums takes so
long that a BF16 GEMM of the widened operands is faster. A GEMM of small M takes as long as reading b, and runs on
kernels of ours.

Octavo is measured on Hopper only. If a GPU has no kernel for a GEMM, it raises an error unless the caller asks for
emulation.
"""

from dataclasses import dataclass

import torch

from octavo.numerics.granularity import ROW, Granularity, block, group
from octavo.ops.gemm.dispatch import LINES
from octavo.ops.gpu_architecture import GpuArchitecture, find_architecture
from octavo.ops.triton_support import FORMATS, HAS_TRITON

# The largest N -> the largest M for which our kernel is faster than cuBLASLt, measured on an H100 at the sizes of
# Llama-3-8B (docs/performance.md). With a larger N, cuBLASLt has enough tiles to read b just as fast.
_MAX_SMALL_M = {4096: 64, 8192: 16}
_MAX_SMALL_M_OF_ANY_N = 8
_MAX_SMALL_M_OF_BLOCKS = 16  # for any N, on an H200: 33 us instead of 40 to 45 with N 28,672 and K 4,096
MAX_SMALL_M = max(_MAX_SMALL_M.values())
SQUARE = block(128, 128)
STRIP = group(128)
MX = group(32)

# Of our kernel for scales along K. A tensor-core instruction multiplies 32 elements of K.
_GROUP_SIZES = (32, 64, 128)
MAX_M_OF_GROUPS = 256  # above it, widening operands in groups of 32 or 64 costs less than scaling their partial sums
_GPUS_OF_OUR_KERNELS = ("ada", "hopper", "blackwell", "rtx_blackwell")

# The architectures that PyTorch refuses every FP8 GEMM.
_WITHOUT_FP8 = {gpu for gpu, _ in LINES} - {gpu for (gpu, _), line in LINES.items() if line.library}

# The version of CUDA that PyTorch was built with. From 12.9 on, cuBLASLt has row and block scales for Hopper.
_CUDA = tuple(int(part) for part in (torch.version.cuda or "99.0").split(".")[:2])
# The dtypes that row-scaled kernels write; cuBLASLt's write any.
_ROW_SCALED_DTYPES = {"cutlass": (torch.bfloat16, torch.float16), "hipblaslt": (torch.bfloat16,)}


@dataclass(frozen=True)
class Backend:
    """The implementation of a scaled GEMM, and the reason for it.

    Args:
        name: "cublaslt", "cutlass", "hipblaslt", "triton", "dequantized" (a BF16 GEMM of the widened operands),
            "emulated" or "none".
        reason: for people.
    """

    name: str
    reason: str


def find_backend(
    device: torch.device,
    granularity_a: Granularity,
    granularity_b: Granularity,
    formats: tuple[str, str],
    size: tuple[int, int] | None = None,
    *,
    e8m0: tuple[bool, bool] = (False, False),
) -> Backend:
    """The implementation that `device` has for operands of these granularities and formats.

    Args:
        device: of the operands.
        granularity_a, granularity_b: of the scales of a and b.
        formats: the names of the formats of a and b.
        size: [M, N] of y; None for a large M.
        e8m0: whether the scales of a and b are E8M0 instead of float32.
    """
    if device.type != "cuda":
        return Backend("emulated", f"{device.type} has no FP8 GEMM: exact, in float32")
    backend = backend_on(find_architecture(device), granularity_a, granularity_b, formats, e8m0=e8m0)
    if backend.name in ("triton", "dequantized") and not HAS_TRITON:
        return Backend("none", f"{backend.reason} need Triton, which is not installed")
    if backend.name == "dequantized" and size is not None and size[0] <= MAX_M_OF_GROUPS:
        return Backend("triton", backend.reason)
    least = 0 if granularity_a.outer else _MAX_SMALL_M_OF_BLOCKS
    small = size is not None and size[0] <= max(max_small_m(size[1]), least)
    nvidia = backend.name in ("cublaslt", "cutlass")
    ours = granularity_a.outer or takes_blocks(granularity_a, granularity_b)
    if small and nvidia and ours and set(formats) <= set(FORMATS) and HAS_TRITON:
        return Backend("triton", f"{backend.reason}, small M")
    return backend


def takes_blocks(granularity_a: Granularity, granularity_b: Granularity) -> bool:
    """Whether our kernel for scales along K takes these: equal groups in a and b, or 1x128 and 128x128 blocks."""
    in_groups = granularity_a.rows == 1 and granularity_a.cols in _GROUP_SIZES
    return in_groups and (granularity_b == granularity_a or (granularity_a, granularity_b) == (STRIP, SQUARE))


def runs_our_kernels(gpu: GpuArchitecture, formats: tuple[str, str]) -> bool:
    """Whether our kernels for many rows run on a GPU of this architecture, for operands of these formats."""
    return gpu.key in _GPUS_OF_OUR_KERNELS and set(formats) <= set(FORMATS) and formats != ("e5m2", "e5m2")


def max_small_m(n: int) -> int:
    """The largest M for which our kernel is faster than cuBLASLt, for y [M, n]."""
    return next((m for max_n, m in _MAX_SMALL_M.items() if n <= max_n), _MAX_SMALL_M_OF_ANY_N)


def backend_on(
    gpu: GpuArchitecture,
    granularity_a: Granularity,
    granularity_b: Granularity,
    formats: tuple[str, str],
    *,
    e8m0: tuple[bool, bool] = (False, False),
) -> Backend:
    """The implementation for a large M on a GPU of this architecture, which need not be here; see `find_backend`."""
    if gpu.key in _WITHOUT_FP8:
        return Backend("none", f"{gpu.name} has no FP8 GEMM")
    a, b = granularity_a.name, granularity_b.name
    kinds = ["E8M0" if is_e8m0 else "float32" for is_e8m0 in e8m0]
    names = f"{a} x {b} scales in {' and '.join(dict.fromkeys(kinds))}"
    note = "" if gpu.measured else f", not measured on {gpu.name}"
    line = LINES.get((architecture_key(gpu), f"{a}{' e8m0' * e8m0[0]}, {b}{' e8m0' * e8m0[1]}"))
    runs = line is not None and " x ".join(formats) in line.formats
    if not runs and runs_our_kernels(gpu, formats) and takes_blocks(granularity_a, granularity_b):
        return Backend("triton" if granularity_a == STRIP else "dequantized", f"{names}{note}")
    if line is None:
        return Backend("none", f"PyTorch has no GEMM with {names} on {gpu.name}")
    if line.refusal:
        return Backend("none", f"PyTorch refuses {names} on {gpu.name}: {line.refusal}")
    if " x ".join(formats) not in line.formats:
        return Backend("none", f"{names} on {gpu.name} take {' or '.join(line.formats)}, not {' x '.join(formats)}")
    return Backend(line.library, f"{names}{note}")


def architecture_key(gpu: GpuArchitecture) -> str:
    """The key of `gpu` in dispatch.json, with the PyTorch that is installed."""
    return "hopper_cuda_12.8" if gpu.key == "hopper" and _CUDA < (12, 9) else gpu.key


def returned_dtype(library: str, granularity: Granularity, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a GEMM of `library` returns y where `dtype` is asked for: BF16 where it cannot write that."""
    able = _ROW_SCALED_DTYPES.get(library) if granularity == ROW else None
    return torch.bfloat16 if able and dtype not in able else dtype
