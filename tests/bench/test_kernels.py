"""bench/gpu/kernels.py calls each operation and its reference with the same arguments; here on few rows and the CPU."""

import pytest
import torch

from bench.gpu import kernels


@pytest.mark.parametrize("k", [4096, 14336])
def test_each_operation_gives_what_its_reference_gives(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    monkeypatch.setattr(kernels, "T", 32)
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    found = list(kernels.kernels(k))
    for kernel in found:
        kernels.check(kernel)
        assert kernel.elements == 32 * k
        assert kernel.bytes >= 2
    assert len({kernel.name for kernel in found}) == len(found)


def test_a_wrong_byte_is_an_error() -> None:
    right = torch.zeros(3, dtype=torch.int32)
    kernel = kernels.Kernel("some", lambda: right, lambda: right + 1, 3, 2)
    with pytest.raises(AssertionError, match="some: 3 of 3 bytes"):
        kernels.check(kernel)
