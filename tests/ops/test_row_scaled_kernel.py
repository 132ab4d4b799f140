"""The grouped GEMM's kernels in Triton's interpreter, against float64 on the same operands; the tilings of row scales.

The interpreter sums in float32. What the tensor cores lose is in test_grouped_gemm_gpu.
"""

from itertools import product as each_with_each

import numpy as np
import pytest
import torch
from gemm_examples import worst_row
from grouped_examples import SIZES, exact, exact_columns, exact_dw, gradient_operands, operands, quantized_columns

from octavo.nn import Experts
from octavo.numerics import ROW
from octavo.ops import Backend
from octavo.ops.launching import Operands
from octavo.recipe import rowwise

pytest.importorskip("triton")
pytestmark = pytest.mark.triton

TILES = [(64, 16, 1, 2, 4), (32, 64, 1, 2, 4)]
SPARE = 3


def product(sizes, k, n, pair, tile, fast, turned):
    """y [M, N] in float32; run in the interpreter, which would cut numbers off at BF16, and not round.

    Without a tile, descriptors load it.
    """
    from octavo.ops.kernels import grouped_gemm as kernel

    a, b, offsets = operands(sizes, k, n, SPARE, pair)
    data = b.data
    if turned:  # [E, N, K] with the strides of [N, E, K], as dx gets it
        data = b.data.view(torch.uint8).transpose(0, 1).contiguous().transpose(0, 1).view(b.data.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "take_descriptors", lambda a, b: True)
        patch.setattr(kernel, "DESCRIBED_NARROW", kernel.Tiling(64, 32, 1, 2, 4))
        given = Operands.of(a, b)._replace(b=data)
        return kernel.grouped_mm(given, offsets, torch.float32, fast, tile and kernel.Tiling(*tile)).numpy()


CASES = [  # k, n, operands, tile, fast accumulation, and matrices in another order of strides
    *((48, 80, *given, False) for given in each_with_each(("row", "row-e5m2"), TILES, (False, True))),
    *((*size, "row", TILES[0], True, turned) for size in ((128, 16), (272, 144)) for turned in (False, True)),
    *((256, 144, "row", None, True, turned) for turned in (False, True)),
    *((272, 144, "strip-square", (64, 16, 2, 2, 4), False, turned) for turned in (False, True)),
    *((272, 144, "mx", (32, 64, 4, 2, 4), False, turned) for turned in (False, True)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_row_times_the_matrix_of_its_group(kernels, sizes, case):
    """With sizes of a step and beyond, loaded by pointers and by descriptors, and with scales along K."""
    k, n, pair, *_ = case
    a, b, _ = operands(sizes, k, n, SPARE, pair)
    y = torch.from_numpy(kernels.submit(product, sizes, *case).result())[: sum(sizes)]
    assert worst_row(y, exact(a, b, sizes)[: sum(sizes)]) < 1e-6


def gradient(sizes, formats, tile, fast):
    """dw [E, N, K] in float32 of operands with row scales; run in the interpreter.

    Without a tile, descriptors load and store it in five programs.
    """
    from octavo.ops.kernels import grouped_gemm as kernel

    h, scale, x_t, offsets = gradient_operands(sizes, formats)
    given = Operands(h, x_t, scale, scale, ROW, ROW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "has_copy_engine", lambda dw: True)
        patch.setattr(kernel, "PROGRAMS", 5)
        patch.setattr(kernel, "DESCRIBED_DW", kernel.Tiling(64, 32, 1, 2, 4))
        return kernel.grouped_mm_dw(given, offsets, torch.float32, fast, tile and kernel.Tiling(*tile)).numpy()


def gradient_along_rows(sizes, pair, tile):
    """As `gradient`, with scales along M."""
    from octavo.ops.kernels import grouped_gemm as kernel

    a, b, offsets = quantized_columns(sizes, pair)
    return kernel.grouped_mm_dw(Operands.of(a, b), offsets, torch.float32, False, kernel.Tiling(*tile)).numpy()


SIZES_OF_DW = pytest.mark.parametrize("sizes", [[128, 0, 128], [0, 0, 128, 0], [256, 1024, 128]], ids=str)


@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize("tile", [*TILES, None], ids=str)
@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")], ids=str)
@SIZES_OF_DW
def test_the_gradient_of_each_matrix_reduces_over_its_group(kernels, sizes, formats, tile, fast):
    h, scale, x_t, _ = gradient_operands(sizes, formats)
    dw = kernels.submit(gradient, sizes, formats, tile, fast).result()
    wide = exact_dw(h, scale, x_t, sizes)
    assert np.abs(dw - wide).max() <= 1e-6 * np.abs(wide).max()
    assert [e for e in range(len(sizes)) if not dw[e].any()] == [e for e, size in enumerate(sizes) if size == 0]


@pytest.mark.parametrize(
    ("pair", "tile"),
    [("strip-strip", (16, 64, 1, 2, 4)), ("group64-e5m2", (64, 32, 1, 2, 4)), ("mx", (128, 32, 1, 2, 4))],
)
@SIZES_OF_DW
def test_the_gradient_of_scales_along_the_rows_of_groups(kernels, sizes, pair, tile):
    a, b, _ = quantized_columns(sizes, pair)
    dw = kernels.submit(gradient_along_rows, sizes, pair, tile).result()
    expected = exact_columns(a, b, sizes)
    assert worst_row(torch.from_numpy(dw).flatten(0, 1), expected.reshape(-1, expected.shape[2])) < 1e-6


def trained(gradients, backend):
    """out, dx and the gradients of the weights of experts, whose grouped GEMMs have this backend; one has no rows."""
    from octavo.ops import grouped_gemm as op
    from octavo.ops.kernels import grouped_gemm as row_scaled_kernel

    torch.manual_seed(0)
    experts = Experts(6, 64, 96)
    experts.recipe = rowwise(gradients)
    x, index, weight = torch.randn(50, 64, requires_grad=True), torch.rand(50, 5).topk(2).indices, torch.rand(50, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "find_grouped_backend", lambda *_, **__: Backend(backend, ""))
        patch.setattr(row_scaled_kernel, "shared_memory", lambda _: 99 * 1024)
        out = experts(x, index, weight)
        out.square().sum().backward()
    return [t.detach().numpy() for t in (out, x.grad, experts.gate_up_proj.grad, experts.down_proj.grad)]


@pytest.mark.parametrize("gradients", ["e4m3", "e5m2"])
def test_experts_train_by_it_as_by_the_reference(kernels, gradients):
    expected = trained(gradients, "emulated")
    found = kernels.submit(trained, gradients, "triton").result()
    for ours, theirs in zip(found, expected, strict=True):
        assert np.linalg.norm(ours - theirs) < 1e-6 * np.linalg.norm(theirs)
    assert not found[2][5].any()


def test_the_tilings(monkeypatch):
    from octavo.ops.kernels import grouped_gemm as kernel

    monkeypatch.setattr(kernel, "shared_memory", lambda device: device)
    ada, hopper = 99 * 1024, 227 * 1024
    assert kernel.choose(1, True, ada) == (64, 16, 1, 4, 4, 1)
    assert kernel.choose(64, False, hopper) == (64, 64, 1, 4, 4, 1)
    assert kernel.choose(65, True, ada) == kernel.choose(1 << 20, True, ada) == (128, 128, 1, 3, 8, 1)
    assert kernel.choose(1 << 20, False, hopper) == (128, 128, 1, 4, 8, 1)
    assert kernel.choose(1 << 20, True, hopper) == (128, 256, 1, 4, 8, 1)
    assert kernel.choose(65, True, hopper) == (256, 128, 1, 4, 8, 1)
