"""The choice of the implementation that a scaled GEMM runs on. One function decides, and reports call it too.

PyTorch's `scaled_mm` has these paths, by compute capability:

    tensor, row             from Ada (8.9); for row scales there, CUTLASS kernels (RowwiseScaledMM.cu)
    1x128, 128x128 blocks   Hopper (9.x) only
    MX                      from Blackwell (10.0): groups of 32 with E8M0 scales

The speed of Octavo on Ada has not been measured. If a GPU has no path for a GEMM, it raises an error unless the caller
asks for emulation. A GEMM of small M takes as long as reading b; it runs on a kernel of ours.
"""

from dataclasses import dataclass

import torch

from octavo.numerics.granularity import ROW, TENSOR, Granularity, block, group
from octavo.ops.triton_support import FORMATS, HAS_TRITON

# The largest N -> the largest M for which our kernel is faster than cuBLASLt, measured on an H100 at the sizes of
# Llama-3-8B (docs/performance.md). With a larger N, cuBLASLt has enough tiles to read b just as fast.
_MAX_SMALL_M = {4096: 64, 8192: 16}
_MAX_SMALL_M_OF_ANY_N = 8
MAX_SMALL_M = max(_MAX_SMALL_M.values())
SQUARE = block(128, 128)
STRIP = group(128)
MX = group(32)

# (granularity of a, granularity of b) -> the lowest and the highest compute capability that has the kernel. MX has E8M0
# scales, all others have float32 scales.
_PATHS: dict[tuple[Granularity, Granularity], tuple[tuple[int, int], tuple[int, int]]] = {
    (TENSOR, TENSOR): ((8, 9), (99, 0)),
    (ROW, ROW): ((8, 9), (99, 0)),
    (STRIP, SQUARE): ((9, 0), (9, 9)),
    (SQUARE, STRIP): ((9, 0), (9, 9)),
    (STRIP, STRIP): ((9, 0), (9, 9)),
    (MX, MX): ((10, 0), (99, 0)),
}


@dataclass(frozen=True)
class Backend:
    """The implementation of a scaled GEMM, "cublaslt", "hipblaslt", "triton", "emulated" or "none", and the reason."""

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
    capability, hip = torch.cuda.get_device_capability(device), torch.version.hip is not None
    backend = _cuda_backend(capability, granularity_a, granularity_b, formats, hip, e8m0)
    small = size is not None and size[0] <= max_small_m(size[1])
    if small and granularity_a.outer and set(formats) <= set(FORMATS) and backend.name == "cublaslt" and HAS_TRITON:
        return Backend("triton", f"{backend.reason}, small M")
    return backend


def max_small_m(n: int) -> int:
    """The largest M for which our kernel is faster than cuBLASLt, for y [M, n]."""
    return next((m for max_n, m in _MAX_SMALL_M.items() if n <= max_n), _MAX_SMALL_M_OF_ANY_N)


def _cuda_backend(
    capability: tuple[int, int],
    granularity_a: Granularity,
    granularity_b: Granularity,
    formats: tuple[str, str],
    hip: bool,
    e8m0: tuple[bool, bool],
) -> Backend:
    kinds = ["E8M0" if is_e8m0 else "float32" for is_e8m0 in e8m0]
    names = f"{granularity_a.name} x {granularity_b.name} scales in {' and '.join(dict.fromkeys(kinds))}"
    fnuz = any(f.endswith("fnuz") for f in formats)
    if formats[0].startswith("e5m2") and formats[1].startswith("e5m2"):
        return Backend("none", "no GEMM takes two E5M2 operands: make one E4M3")
    if hip:
        takes_fnuz = capability == (9, 4)  # gfx942, MI300: FNUZ; later ones take the OCP formats
        if fnuz != takes_fnuz:
            return Backend(
                "none", f"this AMD GPU takes {'FNUZ' if takes_fnuz else 'OCP'} formats, the recipe has {formats}"
            )
        ok = (granularity_a, granularity_b) in ((TENSOR, TENSOR), (ROW, ROW)) and not any(e8m0)
        return Backend("hipblaslt", names) if ok else Backend("none", f"hipBLASLt has no GEMM with {names}")
    if fnuz:
        return Backend("none", "FNUZ formats run on AMD MI300 only")
    path = _PATHS.get((granularity_a, granularity_b))
    if path is None or e8m0 != (granularity_a == MX, granularity_b == MX):
        return Backend("none", f"cuBLASLt has no GEMM with {names}")
    low, high = path
    if not low <= capability <= high:
        needs = f"{low[0]}.{low[1]}" + (f" to {high[0]}.x" if high[0] < 99 else " or newer")
        return Backend("none", f"{names} need compute capability {needs}, this GPU has {capability[0]}.{capability[1]}")
    return Backend("cublaslt", names)
