"""The choice of the implementation that a grouped GEMM runs on.

    triton        our kernels, on NVIDIA GPUs from Ada (8.9), for row scales and for scales that vary along K
                  on Hopper, promoted sums of large groups of two E4M3 operands: PyTorch's `scaled_grouped_mm`
                  with groups smaller than 128 and many rows: PyTorch's BF16 product of the widened operands
    emulated      the reference, in float32: a CPU

ScaledGroupMM.cu in torch 2.11 and 2.13 has f8f8bf16_grouped_gemm_impl_sm90 alone, a CUTLASS kernel whose result is
BF16. On GPUs without a kernel a call raises an error, or computes in float32 if the caller allows emulation.
"""

import torch
from torch import Tensor

from octavo.numerics.granularity import ROW, Granularity
from octavo.ops.gemm import Backend
from octavo.ops.gemm.backend import runs_our_kernels, takes_blocks
from octavo.ops.gpu_architecture import GpuArchitecture, Place, find_architecture
from octavo.ops.triton_support import HAS_TRITON

# Above so many rows of a group, on average, PyTorch's BF16 product of widened operands is faster than our kernels for
# groups of 32 or 64 and for weights alone, by the rates of these in linear layers.
MAX_MEAN_ROWS = 1024
# On Hopper, above so many rows of a group, on average, CUTLASS's kernel promotes sums faster than ours does: 1,007
# against 905 TFLOP/s with 4,096 rows, 322 against 785 with 1,024. Where both sides of a matrix are wide, y and dx are
# faster from fewer rows on: 982 against 822 with 256 (docs/log.md).
CUTLASS_ROWS, CUTLASS_ROWS_OF_WIDE, WIDE = 1024, 128, 4096


def find_grouped_backend(
    place: Place, formats: tuple[str, str], granularity_a: Granularity = ROW, granularity_b: Granularity = ROW
) -> Backend:
    """The implementation that a device or a GPU has for operands of these formats and granularities."""
    if isinstance(place, torch.device) and place.type != "cuda":
        return Backend("emulated", f"{place.type} has no FP8 GEMM: exact, in float32")
    gpu = place if isinstance(place, GpuArchitecture) else find_architecture(place)
    names = f"{granularity_a.name} x {granularity_b.name} scales"
    by_row = (granularity_a, granularity_b) == (ROW, ROW)
    if not runs_our_kernels(gpu, formats) or not (by_row or takes_blocks(granularity_a, granularity_b)):
        return Backend("none", f"no grouped GEMM takes {' x '.join(formats)} with {names} on {gpu.name}")
    if isinstance(place, torch.device) and not HAS_TRITON:
        return Backend("none", f"grouped GEMMs with {names} need Triton, which is not installed")
    return Backend("triton", f"{names}, in groups{'' if gpu.measured else f', not measured on {gpu.name}'}")


def takes_cutlass(a: Tensor, b: Tensor, groups: int, fast: bool) -> bool:
    """Whether PyTorch's kernel is faster than ours for operands with row scales.

    Args:
        a, b: [M, K] and [E, N, K], or [N, M] and [K, M] with groups of columns.
    """
    if b.ndim == 3:
        rows, least = a.shape[0], CUTLASS_ROWS_OF_WIDE if min(b.shape[1:]) >= WIDE else CUTLASS_ROWS
    else:
        rows, least = a.shape[1], CUTLASS_ROWS
    large = not fast and rows > least * groups
    return large and a.dtype == b.dtype == torch.float8_e4m3fn and find_architecture(a.device).key == "hopper"
