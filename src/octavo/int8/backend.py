"""The choice of the implementation that an INT8 GEMM runs on.

emulated      the reference, in float64: a CPU, and a GPU that has no kernel here
"""

from octavo.ops.gemm import Backend
from octavo.ops.gpu_architecture import GpuArchitecture, Place


def find_int8_backend(device: Place) -> Backend:
    """The implementation that `device` has for operands in int8."""
    name = device.name if isinstance(device, GpuArchitecture) else device.type
    return Backend("emulated", f"{name}: exact, in float64")
