"""The choice of our kernel for GEMMs of small M, without a GPU."""

import pytest
import torch

from octavo.numerics import ROW, TENSOR
from octavo.ops import dispatch as backend
from octavo.ops import find_backend
from octavo.ops.dispatch import MAX_SMALL_M, SQUARE, STRIP, max_small_m

CUDA = torch.device("cuda")
E4M3 = ("e4m3", "e4m3")


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backend, "HAS_TRITON", True)


@pytest.mark.parametrize("granularity", [ROW, TENSOR], ids=["row", "tensor"])
def test_a_small_m_runs_on_our_kernel_and_a_larger_one_on_cublaslt(hopper, granularity):
    assert find_backend(CUDA, granularity, granularity, E4M3).name == "cublaslt"
    for n, largest in ((1, MAX_SMALL_M), (4096, MAX_SMALL_M), (4097, 16), (8192, 16), (8193, 8), (128_256, 8)):
        assert max_small_m(n) == largest
        for m, name in ((0, "triton"), (1, "triton"), (largest, "triton"), (largest + 1, "cublaslt")):
            chosen = find_backend(CUDA, granularity, granularity, E4M3, (m, n))
            assert chosen.name == name
            assert ("small M" in chosen.reason) == (name == "triton")


def test_other_granularities_and_formats_do_not(hopper):
    assert find_backend(CUDA, SQUARE, STRIP, E4M3, (1, 64)).name == "cublaslt"
    assert find_backend(CUDA, ROW, TENSOR, E4M3, (1, 64)).name == "none"
    assert find_backend(CUDA, ROW, ROW, ("e5m2", "e5m2"), (1, 64)).name == "none"
    assert find_backend(CUDA, ROW, ROW, ("e4m3fnuz", "e4m3fnuz"), (1, 64)).name == "none"


def test_without_triton_or_a_gpu_there_is_no_kernel(hopper, monkeypatch):
    assert find_backend(torch.device("cpu"), ROW, ROW, E4M3, (1, 64)).name == "emulated"
    monkeypatch.setattr(backend, "HAS_TRITON", False)
    assert find_backend(CUDA, ROW, ROW, E4M3, (1, 64)).name == "cublaslt"


def test_the_choice_is_traced_without_a_break(hopper):
    def names(x):
        actual = find_backend(CUDA, ROW, ROW, E4M3, (x.shape[0], 64))
        return x + (1 if actual.name == "triton" else 2)

    compiled = torch.compile(names, fullgraph=True, backend="eager", dynamic=False)
    assert [compiled(torch.zeros(m)).mean().item() for m in (1, MAX_SMALL_M, MAX_SMALL_M + 1)] == [1, 1, 2]
