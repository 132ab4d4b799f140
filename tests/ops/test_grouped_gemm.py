"""The grouped GEMM on a CPU against float64 on the same quantized operands, and its errors."""

import numpy as np
import pytest
import torch
from gemm_examples import worst_row
from grouped_examples import GROUPED_PAIRS, SIZES, exact, exact_dw, offsets_of, operands

from octavo.numerics import Cast, QTensor, group
from octavo.ops import dispatch as backend
from octavo.ops import find_grouped_backend, grouped_mm, grouped_mm_dw, quantize_matrices, quantize_stack
from octavo.ops.dispatch import SQUARE, STRIP, takes_cutlass
from octavo.ops.launching import architecture_of
from octavo.recipe import ROW_W


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pair", GROUPED_PAIRS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_row_times_the_matrix_of_its_group(sizes, pair, dtype):
    a, b, offsets = operands(sizes, 48, 32, pair=pair)
    y = grouped_mm(a, b, offsets, out_dtype=dtype)
    assert (y.shape, y.dtype) == ((sum(sizes), 32), dtype)
    assert worst_row(y, exact(a, b, sizes)) < {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}[dtype]


def test_matrices_may_be_transposed_views():
    a, b, offsets = operands(SIZES["ragged"], 48, 32)
    turned = b.data.view(torch.uint8).permute(2, 0, 1).contiguous().permute(1, 2, 0).view(b.data.dtype)  # [K, E, N]
    assert not turned.is_contiguous()
    y = grouped_mm(a, QTensor(turned, b.scale, b.format, b.granularity), offsets)
    assert torch.equal(y, grouped_mm(a, b, offsets))


def test_no_rows_at_all():
    a, b, offsets = operands([0, 0], 48, 32)
    assert grouped_mm(a, b, offsets).shape == (0, 32)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_gradient_of_each_matrix_reduces_over_its_group(sizes):
    torch.manual_seed(0)
    h, x_t = (torch.randn(n, sum(sizes)).to(torch.float8_e4m3fn) for n in (32, 48))
    scale = torch.rand(len(sizes), 32, 1) + 0.1
    dw = grouped_mm_dw(h, scale, x_t, offsets_of(sizes), out_dtype=torch.float32)
    wide = exact_dw(h, scale, x_t, sizes)
    assert np.abs(dw.double().numpy() - wide).max() <= 1e-5 * np.abs(wide).max()
    assert [e for e in range(len(sizes)) if not dw[e].any()] == [e for e, size in enumerate(sizes) if size == 0]


@pytest.mark.parametrize("cast", [ROW_W, Cast(), Cast(scale="pow2", relative_floor=0.25)], ids=str)
def test_the_floor_of_a_matrix_does_not_depend_on_the_others(cast):
    torch.manual_seed(0)
    w = torch.randn(4, 10, 32) * torch.exp2(torch.randint(-20, 1, (4, 10, 1)))
    q, alone = quantize_matrices(w, cast), [quantize_stack([matrix], cast) for matrix in w]
    assert torch.equal(q.scale, torch.stack([part.scale for part in alone]))
    assert torch.equal(q.data.view(torch.uint8), torch.stack([part.data.view(torch.uint8) for part in alone]))


E4M3, GRADIENT = ("e4m3", "e4m3"), ("e5m2", "e4m3")


@pytest.mark.parametrize(
    ("capability", "formats", "name"),
    [
        ((9, 0), E4M3, "triton"),
        ((9, 0), GRADIENT, "triton"),
        ((9, 0), ("e4m3", "e5m2"), "triton"),
        ((9, 0), ("e5m2", "e5m2"), "none"),
        ((9, 0), ("e4m3fnuz", "e4m3fnuz"), "none"),
        ((8, 9), E4M3, "triton"),
        ((10, 0), GRADIENT, "triton"),
        ((12, 0), E4M3, "triton"),
        ((8, 0), E4M3, "none"),
        ((13, 0), E4M3, "none"),
    ],
)
def test_row_scales_have_a_kernel_from_ada_on(monkeypatch, capability, formats, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    found = find_grouped_backend(torch.device("cuda"), formats)
    assert found == find_grouped_backend(architecture_of(capability), formats)
    assert found.name == name
    assert ("not measured" in found.reason) == (name == "triton" and capability != (9, 0))
    assert find_grouped_backend(torch.device("cpu"), formats).name == "emulated"
    monkeypatch.setattr(backend, "HAS_TRITON", False)
    without = find_grouped_backend(torch.device("cuda"), formats)
    assert without.name == ("none" if name == "triton" else name)
    assert ("need Triton" in without.reason) == (name == "triton")


@pytest.mark.parametrize(("capability", "name"), [((8, 0), "none"), ((8, 9), "triton"), ((9, 0), "triton")])
@pytest.mark.parametrize("by_b", [STRIP, SQUARE], ids=lambda g: g.name)
def test_scales_along_k_have_a_kernel_from_ada_on(monkeypatch, by_b, capability, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    formats, gpu = E4M3, torch.device("cuda")
    assert find_grouped_backend(gpu, formats, STRIP, by_b).name == name
    assert find_grouped_backend(architecture_of(capability), formats, STRIP, by_b).name == name
    assert find_grouped_backend(gpu, ("e5m2", "e5m2"), STRIP, by_b).name == "none"
    assert find_grouped_backend(gpu, formats, STRIP, group(64)).name == "none"
    monkeypatch.setattr(backend, "HAS_TRITON", False)
    assert find_grouped_backend(gpu, formats, STRIP, by_b).name == "none"
    assert find_grouped_backend(architecture_of(capability), formats, STRIP, by_b).name == name


@pytest.mark.parametrize(
    ("rows", "k", "n", "fast", "expected"),
    [
        (4096, 4096, 14336, False, True),
        (256, 4096, 4096, False, True),
        (128, 4096, 4096, False, False),
        (1024, 2048, 1536, False, False),
        (2048, 2048, 1536, False, True),
        (4096, 4096, 14336, True, False),
    ],
)
def test_promoted_sums_of_large_groups_run_on_cutlass_on_a_hopper(monkeypatch, rows, k, n, fast, expected):
    with torch.device("meta"):
        a, b, e5m2 = (torch.empty(shape, dtype=torch.float8_e4m3fn) for shape in ((2 * rows, k), (2, n, k), (2, n, k)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert takes_cutlass(a, b, 2, fast) is expected
    assert not takes_cutlass(a, e5m2.view(torch.float8_e5m2), 2, fast)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert not takes_cutlass(a, b, 2, fast)


@pytest.mark.parametrize(("columns", "expected"), [(1024, False), (2048, True)])
def test_long_reductions_run_on_cutlass_on_a_hopper(monkeypatch, columns, expected):
    a, b = (torch.empty(n, 2 * columns, dtype=torch.float8_e4m3fn, device="meta") for n in (4096, 4096))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert takes_cutlass(a, b, 2, fast=False) is expected
