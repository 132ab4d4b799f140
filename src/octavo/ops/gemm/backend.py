"""Which implementation a scaled GEMM runs on, decided in one place, so that what is reported is what runs.

The paths of PyTorch's `scaled_mm` by compute capability: tensor and row scales from Ada (8.9), 1x128 and 128x128 blocks
on Hopper (9.x) only, MX, which is groups of 32 with E8M0 scales, from Blackwell (10.0). For row scales PyTorch has
CUTLASS kernels on 8.9 too (RowwiseScaledMM.cu); how fast Octavo is on Ada is not measured. Where no path exists a GPU
raises; emulation runs there only when asked for. Products of few rows, of which the time is that of reading b, have a
kernel of ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.numerics.granularity import ROW, TENSOR, Granularity, block, group
from octavo.ops.triton_support import FORMATS, HAS_TRITON

# Columns of y, at most -> rows, at most, for the kernel that reads b at the speed of memory. As measured on an H100, at
# the sizes of Llama-3-8B (docs/performance.md): of many columns cuBLASLt makes tiles enough to read b as fast.
_FEW_ROWS = {4096: 64, 8192: 16}
_FEWEST_ROWS = 8  # of any number of columns
FEW_ROWS = max(_FEW_ROWS.values())
SQUARE = block(128, 128)
STRIP = group(128)
MX = group(32)

# (layout of a, layout of b) -> the lowest and the highest compute capability that has the kernel. The scales of MX are
# E8M0, all others float32.
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
    """What runs a scaled GEMM: "cublaslt", "hipblaslt", "triton", "emulated" or "none", and why."""

    name: str
    reason: str


def find_backend(
    device: torch.device,
    layout_a: Granularity,
    layout_b: Granularity,
    formats: tuple[str, str],
    size: tuple[int, int] | None = None,
    *,
    e8m0: tuple[bool, bool] = (False, False),
) -> Backend:
    """What `device` has for operands of these layouts and formats.

    Args:
        device: where the operands are.
        layout_a, layout_b: of the scales of a and b.
        formats: the names of the formats of a and b.
        size: [M, N] of y; None for one of many rows.
        e8m0: whether the scales of a and b are E8M0 instead of float32.
    """
    if device.type != "cuda":
        return Backend("emulated", f"{device.type} has no FP8 GEMM: exact, in float32")
    capability, hip = torch.cuda.get_device_capability(device), torch.version.hip is not None
    found = _cuda_backend(capability, layout_a, layout_b, formats, hip, e8m0)
    few = size is not None and size[0] <= few_rows(size[1]) and layout_a.outer and set(formats) <= set(FORMATS)
    if few and found.name == "cublaslt" and HAS_TRITON:
        return Backend("triton", f"{found.reason}, few rows")
    return found


def few_rows(columns: int) -> int:
    """Rows of a, at most, for which our kernel is the faster, where y has so many columns."""
    return next((rows for most, rows in _FEW_ROWS.items() if columns <= most), _FEWEST_ROWS)


def _cuda_backend(
    capability: tuple[int, int],
    layout_a: Granularity,
    layout_b: Granularity,
    formats: tuple[str, str],
    hip: bool,
    e8m0: tuple[bool, bool],
) -> Backend:
    kinds = ["E8M0" if is_e8m0 else "float32" for is_e8m0 in e8m0]
    names = f"{layout_a.name} x {layout_b.name} scales in {' and '.join(dict.fromkeys(kinds))}"
    fnuz = any(f.endswith("fnuz") for f in formats)
    if formats[0].startswith("e5m2") and formats[1].startswith("e5m2"):
        return Backend("none", "no GEMM takes two E5M2 operands: make one E4M3")
    if hip:
        wanted = capability == (9, 4)  # gfx942, MI300: FNUZ; later ones take the OCP formats
        if fnuz != wanted:
            return Backend(
                "none", f"this AMD GPU takes {'FNUZ' if wanted else 'OCP'} formats, the recipe has {formats}"
            )
        ok = (layout_a, layout_b) in ((TENSOR, TENSOR), (ROW, ROW)) and not any(e8m0)
        return Backend("hipblaslt", names) if ok else Backend("none", f"hipBLASLt has no GEMM with {names}")
    if fnuz:
        return Backend("none", "FNUZ formats run on AMD MI300 only")
    path = _PATHS.get((layout_a, layout_b))
    if path is None or e8m0 != (layout_a == MX, layout_b == MX):
        return Backend("none", f"cuBLASLt has no GEMM with {names}")
    low, high = path
    if not low <= capability <= high:
        needs = f"{low[0]}.{low[1]}" + (f" to {high[0]}.x" if high[0] < 99 else " or newer")
        return Backend("none", f"{names} need compute capability {needs}, this GPU has {capability[0]}.{capability[1]}")
    return Backend("cublaslt", names)
