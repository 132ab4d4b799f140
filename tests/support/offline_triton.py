"""Compiling Triton kernels for a GPU that is not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

# The largest shared memory of a program, in bytes: CUDA C++ Programming Guide, "Compute Capabilities".
SHARED_MEMORY = {89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}


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


def compile_for(capability: int, modules: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """From here on the launches of these modules of kernels compile for a GPU of this capability, with ptxas.

    Returns:
        The list that the compiled kernels are added to.
    """
    from triton.runtime.driver import driver

    compiled: list[Any] = []
    monkeypatch.setattr(driver, "_active", _Driver(capability))

    def launcher(kernel: Any, grid: Any) -> Any:
        kernel.device_caches.clear()
        return lambda *args, **constants: compiled.append(kernel.warmup(*args, grid=grid, **constants))

    for module in modules:
        monkeypatch.setattr(module, "launcher", launcher)
        monkeypatch.setattr(module, "multiprocessors", lambda device: 128)
        monkeypatch.setattr(module, "shared_memory", lambda device: SHARED_MEMORY[capability], raising=False)
    return compiled


def on_cpu(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Zeros for the arguments of a kernel that is compiled and not launched."""
    return torch.zeros(shape, dtype=dtype)
