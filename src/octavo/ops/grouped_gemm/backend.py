"""The choice of the implementation that a grouped GEMM runs on.

PyTorch's `scaled_grouped_mm` with row scales is a CUTLASS kernel for Hopper (ScaledGroupMM.cu in torch 2.11 and 2.13
has f8f8bf16_grouped_gemm_impl_sm90 alone). Both its operands are E4M3, and its result is BF16. On other GPUs a call
raises an error, or computes in float32 if the caller allows emulation.
"""

import torch

from octavo.ops.gemm import Backend
from octavo.ops.gpu_architecture import GpuArchitecture, Place, find_architecture


def find_grouped_backend(place: Place, formats: tuple[str, str]) -> Backend:
    """The implementation that a device or a GPU has for row-scaled operands of these formats."""
    if isinstance(place, torch.device) and place.type != "cuda":
        return Backend("emulated", f"{place.type} has no FP8 GEMM: exact, in float32")
    if formats != ("e4m3", "e4m3"):
        return Backend("none", f"the grouped GEMM takes two E4M3 operands, the recipe has {' and '.join(formats)}")
    gpu = place if isinstance(place, GpuArchitecture) else find_architecture(place)
    if gpu.key != "hopper":
        return Backend("none", f"PyTorch has the row-scaled grouped GEMM for Hopper alone, this GPU is {gpu.name}")
    return Backend("cutlass", "row x row scales in float32, in groups")
