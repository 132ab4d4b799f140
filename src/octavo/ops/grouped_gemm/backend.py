"""The choice of the implementation that a grouped GEMM runs on.

PyTorch's `scaled_grouped_mm` with row scales is a CUTLASS kernel for Hopper (ScaledGroupMM.cu). Both its operands are
E4M3, and its result is BF16. On other GPUs it has not been measured, so it is not used there: a call raises an error,
or computes in float32 if the caller allows emulation.
"""

import torch

from octavo.ops.gemm import Backend


def find_grouped_backend(device: torch.device, formats: tuple[str, str]) -> Backend:
    """The implementation that `device` has for row-scaled operands of these formats."""
    if device.type != "cuda":
        return Backend("emulated", f"{device.type} has no FP8 GEMM: exact, in float32")
    if torch.version.hip is not None:
        return Backend("none", "the grouped GEMM of AMD GPUs is not used: it has not been measured")
    if formats != ("e4m3", "e4m3"):
        return Backend("none", f"the grouped GEMM takes two E4M3 operands, the recipe has {' and '.join(formats)}")
    if (capability := torch.cuda.get_device_capability(device))[0] != 9:
        has = f"{capability[0]}.{capability[1]}"
        return Backend("none", f"the row-scaled grouped GEMM needs compute capability 9.0, this GPU has {has}")
    return Backend("cutlass", "row x row scales in float32, in groups")
