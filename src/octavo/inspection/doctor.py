"""The doctor of a machine: versions, and known problems with their fixes."""

import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from octavo.ops.launching import find_architecture
from octavo.util import installed, output_of
from octavo.version import __version__

# ---- Combinations of versions and settings that fail or are slow, each with its fix.
#
# A rule reads facts alone (`Facts`), so a test can state any machine.


# The oldest driver for a major version of CUDA. Source: CUDA Compatibility, "Minor Version Compatibility" (NVIDIA).
_OLDEST_DRIVER = {"12": 525, "13": 580}
_INTERFACES = Path("/sys/class/net")

# Variable -> the effect of the value 1, and the fix.
_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": ("every launch waits for the GPU, so a step is several times slower", "unset it"),
    "TORCH_COMPILE_DISABLE": ("torch.compile does nothing, and compile.blocks gains nothing", "unset it"),
    "TORCHDYNAMO_DISABLE": ("torch.compile does nothing, and compile.blocks gains nothing", "unset it"),
    "TRITON_INTERPRET": ("Triton's kernels are interpreted, and FP8 subnormals are rounded wrongly", "unset it"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("every allocation calls the driver", "unset it"),
    "NCCL_P2P_DISABLE": ("GPUs of one host exchange through the host's memory", "unset it where NVLink works"),
    "NCCL_IB_DISABLE": ("hosts exchange over TCP, not InfiniBand", "unset it on a cluster with InfiniBand"),
}


@dataclass(frozen=True)
class Problem:
    """A combination that fails or is slow."""

    name: str  # of the rule
    found: str  # the combination, and its effect
    fix: str


@dataclass(frozen=True)
class Facts:
    """The facts of a machine that the rules read."""

    environment: Mapping[str, str]
    driver: str = ""  # its version, "" without one
    cuda: str = ""  # the version that PyTorch was built with, "" for a build without
    sees_gpu: bool = False  # PyTorch does
    triton: bool = True  # is installed
    compiler: bool = True  # a C compiler is on the path
    tf32: bool = True  # products of float32 use TF32 tensor cores
    interfaces: tuple[str, ...] = ()  # of the network
    python: str = "3.12"
    extensions: tuple[str, ...] = ()  # the file names of torchao's compiled kernels


def find_problems() -> list[Problem]:
    """The problems of this machine."""
    torchao = find_spec("torchao")
    folder = Path(torchao.origin).parent if torchao and torchao.origin else None
    return judge(
        Facts(
            environment=os.environ,
            driver=driver_version(),
            cuda=torch.version.cuda or "",
            sees_gpu=torch.cuda.is_available(),
            triton=find_spec("triton") is not None,
            compiler=any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")),
            tf32=torch.get_float32_matmul_precision() != "highest",
            interfaces=tuple(path.name for path in _INTERFACES.iterdir()) if _INTERFACES.is_dir() else (),
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            extensions=tuple(path.name for path in folder.glob("*.so")) if folder else (),
        )
    )


def judge(facts: Facts) -> list[Problem]:
    """The problems of a machine with these facts."""
    return [Problem(name, found, fix) for holds, name, found, fix in rules_of(facts) if holds]


def rules_of(facts: Facts) -> tuple[tuple[object, str, str, str], ...]:
    """All rules: whether a machine with these facts has the problem, and the fields of the `Problem`."""
    major, driver = facts.cuda.partition(".")[0], facts.driver.partition(".")[0]
    oldest = _OLDEST_DRIVER.get(major, 0)
    is_old, unseen = driver != "" and int(driver) < oldest, driver != "" and not facts.sees_gpu
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    hidden = visible is not None and (not visible or visible.startswith("-"))
    tags = {".".join(tag) for name in facts.extensions for tag in re.findall(r"\.cpython-(\d)(\d+)-", name)}
    return (
        (unseen and hidden, "hidden GPU", f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU",
         "unset it, or name one: 0"),
        (unseen and not hidden and not facts.cuda, "torch without CUDA",
         "this torch is a build for the CPU, and the machine has an NVIDIA driver",
         "install a build with CUDA: https://pytorch.org/get-started/locally"),
        (unseen and not hidden and facts.cuda and not is_old, "no GPU",
         f"driver {facts.driver} is there, and torch sees no GPU", "run nvidia-smi; reboot"),
        (is_old, "old driver", f"torch was built for CUDA {facts.cuda}, which driver {facts.driver} does not run",
         f"install driver {oldest} or newer, or a torch for an older CUDA"),
        (facts.sees_gpu and not facts.triton, "no Triton",
         "Octavo's kernels are written in Triton, which is not installed", "pip install triton"),
        (facts.sees_gpu and facts.triton and not facts.compiler, "no C compiler",
         "Triton and torch.compile need a C compiler, and none is on the path", "install gcc"),
        (facts.sees_gpu and not facts.tf32, "TF32 is off",
         "products of float32 outside of autocast do not use tensor cores, and torch.compile warns of it",
         'torch.set_float32_matmul_precision("high") if ten bits of mantissa suffice; emulation needs it off'),
        (tags and facts.python not in tags, "torchao for another Python",
         f"torchao's kernels are compiled for Python {', '.join(sorted(tags))}, this is {facts.python}: importing "
         'torchao prints "Failed to load"',
         "nothing for Octavo, which uses no compiled kernel of torchao; else install a torchao for this Python"),
        *map(partial(_rule_of_interface, facts), ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")),
        *((facts.environment.get(name) == "1", "environment", f"{name}=1: {effect}", fix)
          for name, (effect, fix) in _VARIABLES.items()),
    )  # fmt: skip


def _rule_of_interface(facts: Facts, variable: str) -> tuple[bool, str, str, str]:
    given = facts.environment.get(variable, "")
    # "eth" is the prefix of names, "=eth0" an exact name, and "^lo" excludes
    prefixes = [each.removeprefix("=") for each in given.split(",") if each and not given.startswith("^")]
    found = any(name.startswith(tuple(prefixes)) for name in facts.interfaces)
    text = f"{variable}={given}, and there are {', '.join(sorted(facts.interfaces))}: a run on several GPUs hangs"
    missing = bool(prefixes and facts.interfaces) and not found
    return missing, "no such network interface", text, "name one of these, or unset it"


# ---- The versions and the device of this machine.


_PACKAGES = ("triton", "transformers", "torchao", "vllm", "nvidia-cudnn-frontend")
_DRIVER = Path("/proc/driver/nvidia/version")


def read_versions(device: torch.device) -> dict[str, Any]:
    """Versions of the software, and the device that would be used, as JSON values. Packages that are not installed are
    left out. `toolkit` is the CUDA whose compiler is on the path, `cuda` the CUDA that PyTorch was built with."""
    found: dict[str, Any] = {
        "octavo": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **{name: number for name in _PACKAGES if (number := installed(name))},
        "device": device.type,
    }
    toolkit = re.findall(r"release (\d+\.\d+)", output_of("nvcc", "--version"))
    optional = {"driver": driver_version(), "toolkit": "".join(toolkit[:1]), "cuda": torch.version.cuda}
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
    if _DRIVER.is_file() and (found := re.search(r"\b(\d{3}\.\d+(\.\d+)?)\b", _DRIVER.read_text())):
        return found[1]
    lines = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else ""
