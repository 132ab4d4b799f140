"""The architectures of GPUs, by which PyTorch chooses its FP8 GEMMs.

AMD's compute capability is the number of the instruction set, gfx942 being (9, 4).
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GpuArchitecture:
    """A family of GPUs that run the same GEMMs.

    Args:
        key: the name in tables and options.
        name: the name for people, with an example.
        lowest: the lowest compute capability that belongs to it.
        measured: whether Octavo's speed and results were measured on such a GPU.
    """

    key: str
    name: str
    lowest: tuple[int, int]
    measured: bool = False


# A GPU belongs to the last architecture whose lowest compute capability it reaches.
NVIDIA = (
    GpuArchitecture("older", "NVIDIA before Ampere", (0, 0)),
    GpuArchitecture("ampere", "Ampere (A100, RTX 30)", (8, 0)),
    GpuArchitecture("ada", "Ada (L40S, RTX 40)", (8, 9)),
    GpuArchitecture("hopper", "Hopper (H100, H200)", (9, 0), measured=True),
    GpuArchitecture("blackwell", "Blackwell (B200)", (10, 0)),
    GpuArchitecture("rtx_blackwell", "RTX Blackwell (RTX 50)", (12, 0)),
    GpuArchitecture("unknown", "an NVIDIA GPU newer than Blackwell", (13, 0)),
)
AMD = (
    GpuArchitecture("amd_older", "AMD before MI300", (0, 0)),
    GpuArchitecture("mi300", "AMD MI300 (gfx942)", (9, 4)),
    GpuArchitecture("mi350", "AMD MI350 (gfx950)", (9, 5)),
    GpuArchitecture("amd_other", "another AMD GPU", (9, 6)),
    GpuArchitecture("rdna4", "AMD RDNA 4 (gfx120x)", (12, 0)),
    GpuArchitecture("amd_newer", "an AMD GPU newer than RDNA 4", (12, 1)),
)
Place = torch.device | GpuArchitecture  # a GPU that is here, or one that need not be
ARCHITECTURES = {each.key: each for each in NVIDIA + AMD}


def find_architecture(device: torch.device) -> GpuArchitecture:
    """The architecture of the GPU `device`."""
    capability = torch.cuda.get_device_capability(device)
    return architecture_of(capability, amd=torch.version.hip is not None)


def architecture_of(capability: tuple[int, int], *, amd: bool = False) -> GpuArchitecture:
    """The architecture of this compute capability."""
    found = AMD[0] if amd else NVIDIA[0]
    for each in AMD if amd else NVIDIA:
        if each.lowest <= capability:
            found = each
    return found


def takes_fnuz(place: Place) -> bool:
    """Whether the GEMMs of a device, or of a GPU that need not be here, take the FNUZ formats: those of an MI300."""
    if isinstance(place, GpuArchitecture):
        return place.key == "mi300"
    return place.type == "cuda" and find_architecture(place).key == "mi300"
