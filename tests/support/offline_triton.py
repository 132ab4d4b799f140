"""Compiling Triton kernels for a GPU that is not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

# The largest shared memory of a program, in bytes: CUDA C++ Programming Guide, "Compute Capabilities".
SHARED_MEMORY = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


class _Driver:
    """As much of a driver as compiling needs."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled(list[Any]):
    """The kernels that were compiled for a GPU of this capability."""

    def __init__(self, capability: int) -> None:
        self.limit = SHARED_MEMORY[capability]

    @property
    def shared(self) -> list[int]:
        """Bytes of shared memory of a program of each kernel."""
        return [kernel.metadata.shared for kernel in self]

    def fit(self) -> bool:
        return bool(self) and max(self.shared) <= self.limit


def compile_for(capability: int, module: Any, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """From here on the launches of a module of kernels compile for a GPU of this capability, with ptxas. The kernels
    are added to the list that this returns."""
    from triton.runtime.driver import driver

    from octavo.ops.kernels import device_math as column_sums_kernel

    compiled = Compiled(capability)
    monkeypatch.setattr(driver, "_active", _Driver(capability))

    def launcher(kernel: Any, grid: Any) -> Any:
        kernel.device_caches.clear()
        return lambda *args, **constants: compiled.append(kernel.warmup(*args, grid=grid, **constants))

    for each in (module, column_sums_kernel):  # several modules of kernels launch those of the second
        monkeypatch.setattr(each, "launcher", launcher)
    monkeypatch.setattr(module, "multiprocessors", lambda device: 128, raising=False)
    monkeypatch.setattr(module, "shared_memory", lambda device: compiled.limit, raising=False)
    if hasattr(module, "choose"):
        monkeypatch.setattr(module, "choose", module.choose.__wrapped__)  # without its cache
    return compiled


def on_cpu(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Zeros for the arguments of a kernel that is compiled and not launched."""
    return torch.zeros(shape, dtype=dtype)
