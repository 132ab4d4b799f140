"""The memory of the device that a run trains on."""

import os
import resource
import sys

import torch


def peak_memory(device: torch.device) -> int:
    """The peak in bytes so far: of tensors on a GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def total_memory(device: torch.device) -> int:
    """The bytes of a GPU, or this process's part of those of the CPU, which the processes of a machine share."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun sets it
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // processes
