"""Compiling kernels without launching them, with a kernel that stands in for one of Triton."""

import threading
from collections import defaultdict
from typing import Any

import pytest
import torch

from octavo.ops import launching as compiling
from octavo.ops.launching import compile_only, launch, running


class Kernel:
    """Records the calls that Triton's kernels get."""

    def __init__(self) -> None:
        self.device_caches: dict[int, list[Any]] = defaultdict(list)
        self.compiled: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()

    def warmup(self, *args: Any, grid: tuple[int, ...], **constants: Any) -> "Kernel":
        self.threads.add(threading.get_ident())
        self.compiled.append((*args[1:], grid, constants))
        if constants.get("FAILS"):
            raise ValueError("no such kernel")
        return self

    @property
    def run(self) -> None:
        self.compiled.append(("loaded",))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **constants: self.compiled.append(("launched", *args[1:], grid, constants))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(compiling.torch.cuda, "device", lambda device: torch.no_grad())
    return Kernel()


def test_each_kernel_is_compiled_once_in_another_thread(kernel: Kernel) -> None:
    x = torch.zeros(16)
    with compile_only():
        for n in (17, 18, 33):  # of one kind: no multiple of 16
            launch(kernel, (n,), x, n, BLOCK=2)
    assert kernel.compiled == [(17, (17,), {"BLOCK": 2}), ("loaded",)]
    assert threading.get_ident() not in kernel.threads
    assert list(kernel.device_caches) == [-1]


def test_other_sizes_and_constants_are_other_kernels(kernel: Kernel) -> None:
    x = torch.zeros(16)
    with compile_only():
        for n, block in ((17, 2), (32, 2), (1, 2), (17, 4)):
            launch(kernel, (1,), x, n, BLOCK=block)
    assert sorted(call[0] for call in kernel.compiled if call != ("loaded",)) == [1, 17, 17, 32]


def test_an_error_leaves_the_kernel_to_its_first_launch(kernel: Kernel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "octavo"), compile_only():
        launch(kernel, (1,), torch.zeros(16), 5, FAILS=True)
    assert running.get() is None
    assert "no such kernel" in caplog.text
    launch(kernel, (1,), torch.zeros(16), 5, FAILS=False)
    assert kernel.compiled[-1] == ("launched", 5, (1,), {"FAILS": False})
