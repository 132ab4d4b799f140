"""The versions and the device of this machine."""

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from octavo.extras import installed
from octavo.ops.gpu_architecture import find_architecture
from octavo.version import __version__

_PACKAGES = ("triton", "transformers", "torchao", "vllm", "nvidia-cudnn-frontend")
_DRIVER = Path("/proc/driver/nvidia/version")


def read_versions(device: torch.device) -> dict[str, Any]:
    """Versions of the software, and the device that would be used, as JSON values.

    Packages that are not installed are left out. `driver` is the NVIDIA driver's version; `toolkit` that of the CUDA
    toolkit whose compiler, nvcc, is on the path (Octavo needs none); `cuda` that of CUDA that PyTorch was built with.
    """
    found: dict[str, Any] = {
        "octavo": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **{name: number for name in _PACKAGES if (number := installed(name))},
        "device": device.type,
    }
    optional = {"driver": driver_version(), "toolkit": _toolkit_version(), "cuda": torch.version.cuda}
    found |= {name: value for name, value in optional.items() if value}
    if device.type != "cuda":
        return found | {"processor": platform.machine(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    return found | {
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "nccl": ".".join(map(str, nccl)),
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "architecture": find_architecture(device).name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_gb": round(properties.total_memory / 1e9, 1),
    }


def driver_version() -> str:
    """The version of the NVIDIA driver; "" where there is none."""
    if _DRIVER.is_file():
        found = re.search(r"\b(\d{3}\.\d+(\.\d+)?)\b", _DRIVER.read_text())
        if found:
            return found[1]
    return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _toolkit_version() -> str:
    found = re.search(r"release (\d+\.\d+)", _output("nvcc", "--version"))
    return found[1] if found else ""


def _first_line(*words: str) -> str:
    lines = _output(*words).splitlines()
    return lines[0].strip() if lines else ""


def _output(*words: str) -> str:
    """The standard output of a program; "" if it is not installed or fails."""
    program = shutil.which(words[0])
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *words[1:]], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
