"""Combinations of versions and settings that fail or are slow, each with its fix.

A rule reads facts alone (`Facts`), so a test can state any machine.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from octavo.diagnosis.versions import driver_version

# The oldest driver for a major version of CUDA. Source: CUDA Compatibility, "Minor Version Compatibility" (NVIDIA).
_OLDEST_DRIVER = {"12": 525, "13": 580}
_INTERFACES = Path("/sys/class/net")

# Variable -> (the values that matter, the effect, the fix).
_VARIABLES: dict[str, tuple[str, str, str]] = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every launch waits for the GPU, so a step is several times slower", "unset it"),
    "TORCH_COMPILE_DISABLE": ("1", "torch.compile does nothing, and compile.blocks gains nothing", "unset it"),
    "TORCHDYNAMO_DISABLE": ("1", "torch.compile does nothing, and compile.blocks gains nothing", "unset it"),
    "TRITON_INTERPRET": ("1", "Triton's kernels are interpreted, and FP8 subnormals are rounded wrongly", "unset it"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "every allocation calls the driver", "unset it"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of one host exchange through the host's memory", "unset it where NVLink works"),
    "NCCL_IB_DISABLE": ("1", "hosts exchange over TCP, not InfiniBand", "unset it on a cluster with InfiniBand"),
}


@dataclass(frozen=True)
class Problem:
    """A combination that fails or is slow.

    Args:
        name: of the rule.
        found: the combination, and its effect.
        fix: what to do.
    """

    name: str
    found: str
    fix: str


@dataclass(frozen=True)
class Facts:
    """The facts of a machine that the rules read.

    Args:
        environment: its variables.
        driver: the version of the NVIDIA driver, "" without one.
        cuda: the version of CUDA that PyTorch was built with, "" for a build without.
        sees_gpu: whether PyTorch sees a GPU.
        triton: whether Triton is installed.
        compiler: whether a C compiler is on the path.
        tf32: whether products of float32 use TF32 tensor cores.
        interfaces: the names of the network interfaces.
        python: such as "3.11".
        extensions: the file names of torchao's compiled kernels.
    """

    environment: Mapping[str, str]
    driver: str = ""
    cuda: str = ""
    sees_gpu: bool = False
    triton: bool = True
    compiler: bool = True
    tf32: bool = True
    interfaces: tuple[str, ...] = ()
    python: str = "3.12"
    extensions: tuple[str, ...] = ()


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
    return [problem for rule in _RULES for problem in rule(facts)]


def _gpu_unseen(facts: Facts) -> Iterator[Problem]:
    if facts.sees_gpu or not facts.driver:
        return
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (not visible or visible.startswith("-")):
        yield Problem("hidden GPU", f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU", "unset it, or name one: 0")
    elif not facts.cuda:
        yield Problem(
            "torch without CUDA",
            "this torch is a build for the CPU, and the machine has an NVIDIA driver",
            "install a build with CUDA: https://pytorch.org/get-started/locally",
        )
    elif not _is_old(facts):
        yield Problem("no GPU", f"driver {facts.driver} is there, and torch sees no GPU", "run nvidia-smi; reboot")


def _old_driver(facts: Facts) -> Iterator[Problem]:
    if _is_old(facts):
        yield Problem(
            "old driver",
            f"torch was built for CUDA {facts.cuda}, which driver {facts.driver} does not run",
            f"install driver {_OLDEST_DRIVER[facts.cuda.partition('.')[0]]} or newer, or a torch for an older CUDA",
        )


def _is_old(facts: Facts) -> bool:
    oldest = _OLDEST_DRIVER.get(facts.cuda.partition(".")[0], 0)
    return bool(facts.driver) and int(facts.driver.partition(".")[0]) < oldest


def _no_kernels(facts: Facts) -> Iterator[Problem]:
    if not facts.sees_gpu:
        return
    if not facts.triton:
        yield Problem(
            "no Triton", "Octavo's kernels are written in Triton, which is not installed", "pip install triton"
        )
    elif not facts.compiler:
        yield Problem(
            "no C compiler", "Triton and torch.compile need a C compiler, and none is on the path", "install gcc"
        )


def _tf32(facts: Facts) -> Iterator[Problem]:
    if facts.sees_gpu and not facts.tf32:
        yield Problem(
            "TF32 is off",
            "products of float32 outside of autocast do not use tensor cores, and torch.compile warns of it",
            'torch.set_float32_matmul_precision("high") if ten bits of mantissa suffice; emulation needs it off',
        )


def _torchao(facts: Facts) -> Iterator[Problem]:
    tags = {
        ".".join(found.groups()) for name in facts.extensions if (found := re.search(r"\.cpython-(\d)(\d+)-", name))
    }
    if tags and facts.python not in tags:
        yield Problem(
            "torchao for another Python",
            f"torchao's kernels are compiled for Python {', '.join(sorted(tags))}, this is {facts.python}: importing "
            'torchao prints "Failed to load"',
            "nothing for Octavo, which uses no compiled kernel of torchao; else install a torchao for this Python",
        )


def _interfaces(facts: Facts) -> Iterator[Problem]:
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        given = facts.environment.get(name, "")
        # "eth" is the prefix of names, "=eth0" an exact name, and "^lo" excludes
        prefixes = [each.removeprefix("=") for each in given.split(",") if each and not given.startswith("^")]
        if prefixes and facts.interfaces and not any(i.startswith(tuple(prefixes)) for i in facts.interfaces):
            yield Problem(
                "no such network interface",
                f"{name}={given}, and there are {', '.join(sorted(facts.interfaces))}: a run on several GPUs hangs",
                "name one of these, or unset it",
            )


def _variables(facts: Facts) -> Iterator[Problem]:
    for name, (value, effect, fix) in _VARIABLES.items():
        if facts.environment.get(name) == value:
            yield Problem("environment", f"{name}={value}: {effect}", fix)


_RULES: tuple[Callable[[Facts], Iterator[Problem]], ...] = (
    _gpu_unseen, _old_driver, _no_kernels, _tf32, _torchao, _interfaces, _variables,
)  # fmt: skip
