"""The choice of the implementation that an INT8 GEMM runs on.

triton        our kernel, on the INT8 tensor cores of NVIDIA GPUs from Ampere (8.0) on
emulated      the reference, in float64: a CPU, and a GPU for which there is no kernel here
"""

from octavo.ops.gemm import Backend
from octavo.ops.gpu_architecture import GpuArchitecture, Place
from octavo.ops.triton_support import has_kernels

LOWEST = (8, 0)


def find_int8_backend(device: Place) -> Backend:
    """The implementation that `device` has for operands in int8."""
    if has_kernels(device, LOWEST):
        return Backend("triton", "INT8 tensor cores")
    if isinstance(device, GpuArchitecture) or device.type == "cuda":
        return Backend("emulated", "no kernel for this GPU: exact, in float64, and slow")
    return Backend("emulated", f"{device.type}: exact, in float64")
