"""The choice of the implementation that an INT8 GEMM runs on.

triton        our kernels, on the INT8 tensor cores of NVIDIA GPUs from Ampere (8.0) on; from 65 rows on cuBLASLt makes
              the sums, and our kernel scales them
emulated      the reference, in float64: a CPU, and a GPU for which there is no kernel here
"""

from octavo.ops.gemm import Backend
from octavo.ops.gpu_architecture import NVIDIA, GpuArchitecture, Place, find_architecture
from octavo.ops.triton_support import HAS_TRITON

LOWEST = (8, 0)
_GPUS = tuple(gpu.key for gpu in NVIDIA if gpu.lowest >= LOWEST)


def find_int8_backend(device: Place) -> Backend:
    """The implementation that `device` has for operands in int8. torch.compile traces this."""
    if isinstance(device, GpuArchitecture):
        has_kernel = device.key in _GPUS
    elif device.type == "cuda":
        has_kernel = HAS_TRITON and find_architecture(device).key in _GPUS
    else:
        return Backend("emulated", f"{device.type}: exact, in float64")
    if has_kernel:
        return Backend("triton", "INT8 tensor cores")
    return Backend("emulated", "no kernel for this GPU: exact, in float64, and slow")
