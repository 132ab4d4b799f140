"""Which products of few rows go to the kernel of ours, and how it cuts them up: what needs no GPU."""

import pytest
import torch

from octavo.numerics import ROW, TENSOR
from octavo.ops import find_backend
from octavo.ops.gemm import FEW_ROWS, backend
from octavo.ops.gemm.backend import SQUARE, STRIP, few_rows

CUDA = torch.device("cuda")
E4M3 = ("e4m3", "e4m3")


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backend, "HAS_TRITON", True)


@pytest.mark.parametrize("layout", [ROW, TENSOR], ids=["row", "tensor"])
def test_few_rows_run_on_our_kernel_and_more_on_cublaslt(hopper, layout):
    assert find_backend(CUDA, layout, layout, E4M3).name == "cublaslt"  # what a layer runs on, asked without a batch
    for columns, most in ((1, FEW_ROWS), (4096, FEW_ROWS), (4097, 16), (8192, 16), (8193, 8), (128_256, 8)):
        assert few_rows(columns) == most
        for rows, name in ((0, "triton"), (1, "triton"), (most, "triton"), (most + 1, "cublaslt")):
            found = find_backend(CUDA, layout, layout, E4M3, (rows, columns))
            assert found.name == name
            assert ("rows" in found.reason) == (name == "triton")


def test_other_layouts_and_formats_do_not(hopper):
    assert find_backend(CUDA, STRIP, SQUARE, E4M3, (1, 64)).name == "cublaslt"
    assert find_backend(CUDA, ROW, TENSOR, E4M3, (1, 64)).name == "none"
    assert find_backend(CUDA, ROW, ROW, ("e5m2", "e5m2"), (1, 64)).name == "none"
    assert find_backend(CUDA, ROW, ROW, ("e4m3fnuz", "e4m3fnuz"), (1, 64)).name == "none"


def test_without_triton_or_a_gpu_there_is_no_kernel(hopper, monkeypatch):
    assert find_backend(torch.device("cpu"), ROW, ROW, E4M3, (1, 64)).name == "emulated"
    monkeypatch.setattr(backend, "HAS_TRITON", False)
    assert find_backend(CUDA, ROW, ROW, E4M3, (1, 64)).name == "cublaslt"


def test_the_choice_is_traced_without_a_break(hopper):
    def names(x):
        found = find_backend(CUDA, ROW, ROW, E4M3, (x.shape[0], 64))
        return x + (1 if found.name == "triton" else 2)

    compiled = torch.compile(names, fullgraph=True, backend="eager", dynamic=False)
    assert [compiled(torch.zeros(rows)).sum().item() / rows for rows in (1, FEW_ROWS, FEW_ROWS + 1)] == [1, 1, 2]
