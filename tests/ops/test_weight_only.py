"""The weight-only GEMM on a CPU against float64, and the choice of its implementation."""

import pytest
import torch
from grouped_examples import SIZES as GROUPS
from weight_only_examples import (
    CASTS,
    GROUPED_CASTS,
    assert_close,
    assert_close_in_groups,
    grouped_operands,
    operands,
)

from octavo.numerics import ROW, Cast, QTensor, group
from octavo.ops import dispatch as backend
from octavo.ops import grouped_weight_only_mm, weight_only_mm
from octavo.ops import weight_only as op
from octavo.ops.dispatch import find_weight_only_backend

CUDA = torch.device("cuda")
SIZES = [(1, 32, 1), (3, 160, 7), (17, 256, 129)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("cast", CASTS)
def test_every_element_is_rounded_once(cast, size, dtype):
    m, k, n = size
    x, w = operands(cast, m, k, n, dtype)
    bias = torch.randn(n).to(dtype)
    y = weight_only_mm(x, w, bias=bias)
    assert (y.shape, y.dtype) == ((m, n), dtype)
    assert_close(y, x, w, bias)
    residual = torch.randn(m, n).to(dtype)
    assert torch.equal(weight_only_mm(x, w, bias=bias, residual=residual), y + residual)


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("cast", GROUPED_CASTS)
def test_each_row_times_the_matrix_of_its_group(cast, sizes):
    x, w, offsets = grouped_operands(cast, sizes, 160, 136)
    y = grouped_weight_only_mm(x, w, offsets)
    assert (y.shape, y.dtype) == ((len(x), 136), torch.bfloat16)
    assert_close_in_groups(y, x, w, sizes)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 64, 32), (3, 64, 0), (3, 0, 32)])
def test_empty_operands(m, k, n):
    x, w = torch.ones(m, k).bfloat16(), QTensor(*empty(n, k), Cast().fmt, ROW)
    assert torch.equal(weight_only_mm(x, w), torch.zeros(m, n).bfloat16())


def empty(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(n, k, dtype=torch.float8_e4m3fn), torch.ones(n, 1)


def test_a_row_with_nan_gives_nan_and_no_other_does():
    x, w = operands("row", 3, 64, 5)
    w.data.view(torch.uint8)[2, 7] = 0x7F
    y = weight_only_mm(x, w)
    assert y[:, 2].isnan().all()
    assert y[:, [0, 1, 3, 4]].isfinite().all()


def test_autocast_does_not_change_the_product():
    x, w = operands("row", 3, 64, 5, torch.float32)
    expected = weight_only_mm(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(weight_only_mm(x, w), expected)


@pytest.fixture
def capability(monkeypatch):
    """Sets the compute capability of the GPU."""

    def set_capability(*found: int) -> None:
        monkeypatch.setattr(backend, "has_kernels", lambda device, lowest: found >= lowest)

    return set_capability


def name(dtype=torch.bfloat16, granularity=ROW, m=1) -> str:
    return find_weight_only_backend(CUDA, dtype, granularity, m).name


def test_every_gpu_has_a_path_and_a_small_m_the_kernel(capability):
    for found in ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0)):
        capability(*found)
        assert [name(m=m) for m in (1, backend.MAX_M, backend.MAX_M + 1)] == ["triton", "triton", "dequantized"]
        assert name(torch.float16) == "triton"
        assert name(torch.float32) == "dequantized"
        assert [name(granularity=by) for by in (group(32), group(128), group(48))] == ["triton"] * 2 + ["dequantized"]
    capability(7, 5)
    assert name() == "dequantized"
    assert find_weight_only_backend(torch.device("cpu"), torch.bfloat16, ROW, 1).name == "emulated"


@pytest.mark.parametrize("cast", CASTS)
def test_without_a_kernel_the_widened_weight_is_multiplied(cast, monkeypatch):
    """The path of GPUs before Ampere, which also runs on a CPU."""
    monkeypatch.setattr(op, "find_weight_only_backend", lambda *_: backend.Backend("dequantized", ""))
    x, w = operands(cast, 3, 256, 130)
    bias, residual = torch.randn(130).bfloat16(), torch.randn(3, 130).bfloat16()
    y = weight_only_mm(x, w, bias=bias)
    assert_close(y, x, w, bias, rounded_weight=True)
    assert torch.equal(weight_only_mm(x, w, bias=bias, residual=residual), y + residual)
