"""Where attention runs in FP8: the GPUs, head sizes and libraries."""

from functools import cache
from importlib.util import find_spec

import torch

from octavo.ops.gpu_architecture import GpuArchitecture, Place

GRADIENT_TILE = 128  # tokens: of 200, which it does not divide, cuDNN 9.19 gave dq with 17 dB on an H200, not 21
HEAD_DIM = 128  # the only one whose gradient Hopper has, and the only one that is faster than BF16
HAS_CUDNN = find_spec("cudnn") is not None  # nvidia-cudnn-frontend; found at import, as Triton is


@cache
def fp8_attention_limit(device: Place, head_dim: int) -> str:
    """Why attention with heads of `head_dim` elements does not run in FP8 on `device`; "" if it does.

    cuDNN has FP8 attention for Hopper and Blackwell. Only Hopper has been measured. For the architecture of a GPU that
    is not here, the libraries of this machine do not matter.
    """
    if isinstance(device, GpuArchitecture):
        if device.key not in ("hopper", "blackwell"):
            return f"cuDNN has FP8 attention for Hopper and Blackwell, and this GPU is {device.name}"
    elif device.type != "cuda" or torch.version.hip is not None:
        return f"FP8 attention needs an NVIDIA GPU, and the device is {device}"
    else:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 9 or major > 10:
            return f"cuDNN has FP8 attention for compute capability 9.0 and 10.0, and this GPU has {major}.{minor}"
    if head_dim != HEAD_DIM:
        return f"FP8 attention takes heads of {HEAD_DIM} elements, and these have {head_dim}"
    if isinstance(device, torch.device) and not HAS_CUDNN:
        return 'FP8 attention needs nvidia-cudnn-frontend: run pip install ".[cudnn]" in the source folder of Octavo'
    return ""
