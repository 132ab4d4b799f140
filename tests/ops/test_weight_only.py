"""The weight-only GEMM on a CPU against float64."""

import pytest
import torch
import weight_only_examples as examples
from grouped_examples import SIZES as GROUPS
from interpreted_triton import run_kernel

from octavo.numerics import ROW, Cast, QTensor, group
from octavo.numerics.formats import E4M3
from octavo.ops import Backend, grouped_weight_only_mm, weight_only_mm
from octavo.ops import weight_only as op
from octavo.ops.launching import Around

SIZES = [(1, 32, 1), (3, 160, 7), (17, 256, 129)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("cast", examples.CASTS)
def test_every_element_is_rounded_once(cast, size, dtype):
    m, k, n = size
    x, w = examples.operands(cast, m, k, n, dtype)
    bias = torch.randn(n).to(dtype)
    y = weight_only_mm(x, w, bias=bias)
    assert (y.shape, y.dtype) == ((m, n), dtype)
    examples.assert_close(y, x, w, bias)
    residual = torch.randn(m, n).to(dtype)
    assert torch.equal(weight_only_mm(x, w, bias=bias, residual=residual), y + residual)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("cast", "biased", "normed", "gated"), examples.ROWS)
def test_one_row_with_its_norm_and_its_activation(cast, biased, normed, gated, dtype):
    given = examples.row_operands(cast, 160, 12, dtype, biased, normed)
    y = weight_only_mm(*given[:2], bias=given[2], around=Around(given[3], 0.1, gated))
    assert (y.shape, y.dtype) == ((1, 6 if gated else 12), dtype)
    examples.assert_close_row(y, *given, 0.1, gated)


@pytest.mark.triton
@pytest.mark.parametrize(("cast", "biased", "normed", "gated"), examples.ROWS)
def test_the_kernel_of_one_row(cast, biased, normed, gated, kernels):
    x, w, bias, norm = examples.row_operands(cast, 544, 28, torch.float16, biased, normed)
    given = x, w.data, w.scale, w.granularity, bias, None, Around(norm, 0.1, gated)
    y = kernels.submit(run_kernel, "weight_only", "weight_only_mm", *given, native=True).result()
    examples.assert_close_row(y, x, w, bias, norm, 0.1, gated)


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("cast", examples.GROUPED_CASTS)
def test_each_row_times_the_matrix_of_its_group(cast, sizes):
    x, w, offsets = examples.grouped_operands(cast, sizes, 160, 136)
    y = grouped_weight_only_mm(x, w, offsets)
    assert (y.shape, y.dtype) == ((len(x), 136), torch.bfloat16)
    examples.assert_close_in_groups(y, x, w, sizes)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 64, 32), (3, 64, 0), (3, 0, 32)])
def test_empty_operands(m, k, n):
    w = QTensor(torch.zeros(n, k, dtype=torch.float8_e4m3fn), torch.ones(n, 1), Cast().fmt, ROW)
    assert torch.equal(weight_only_mm(torch.ones(m, k).bfloat16(), w), torch.zeros(m, n).bfloat16())


def test_a_row_with_nan_gives_nan_and_no_other_does():
    x, w = examples.operands("row", 3, 64, 5)
    w.data.view(torch.uint8)[2, 7] = 0x7F
    y = weight_only_mm(x, w)
    assert y[:, 2].isnan().all()
    assert y[:, [0, 1, 3, 4]].isfinite().all()


def test_autocast_does_not_change_the_product():
    x, w = examples.operands("row", 3, 64, 5, torch.float32)
    expected = weight_only_mm(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(weight_only_mm(x, w), expected)


@pytest.mark.triton
def test_the_kernel_widens_every_scale_of_e8m0(kernels):
    """255 is NaN, and 0 is 2^-127."""
    scale, by = torch.arange(256, dtype=torch.uint8).view(8, 32).view(torch.float8_e8m0fnu), group(4)
    w = QTensor(torch.ones(8, 128).to(torch.float8_e4m3fn), scale, E4M3, by)
    given = w.data, scale, by, torch.float32
    found = kernels.submit(run_kernel, "weight_only", "dequantize", *given, native=True).result()
    torch.testing.assert_close(found, w.dequantize(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cast", examples.CASTS)
def test_without_a_kernel_the_widened_weight_is_multiplied(cast, monkeypatch):
    """The path of GPUs before Ampere, which also runs on a CPU."""
    monkeypatch.setattr(op, "find_weight_only_backend", lambda *_: Backend("dequantized", ""))
    x, w = examples.operands(cast, 3, 256, 130)
    bias, residual = torch.randn(130).bfloat16(), torch.randn(3, 130).bfloat16()
    y = weight_only_mm(x, w, bias=bias)
    examples.assert_close(y, x, w, bias, rounded_weight=True)
    assert torch.equal(weight_only_mm(x, w, bias=bias, residual=residual), y + residual)
