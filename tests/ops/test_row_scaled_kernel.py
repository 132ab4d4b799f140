"""The grouped GEMM's kernel of row scales in Triton's interpreter, against float64 on the same operands; its tilings.

The interpreter sums in float32. What the tensor cores lose is in test_grouped_gemm_gpu.
"""

from collections.abc import Iterator
from concurrent.futures import Executor

import numpy as np
import pytest
import torch
from gemm_examples import worst_row
from grouped_examples import SIZES, exact, exact_dw, offsets_of, operands
from interpreted_triton import interpreter

pytest.importorskip("triton")

PAIRS = ["row", "row-e5m2"]
TILES = [(64, 16, 2, 4), (32, 64, 2, 4)]
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SPARE = 3


@pytest.fixture(scope="module")
def kernels() -> Iterator[Executor]:
    with interpreter() as pool:
        yield pool


def product(sizes, k, n, pair, tile, fast, turned):
    """y [M, N] in float32; run in the interpreter, which would cut numbers off at BF16, and not round."""
    from octavo.ops.grouped_gemm import row_scaled_kernel as kernel

    a, b, offsets = operands(sizes, k, n, SPARE, pair)
    data = b.data
    if turned:  # [E, N, K] with the strides of [N, E, K], as dx gets it
        data = b.data.view(torch.uint8).transpose(0, 1).contiguous().transpose(0, 1).view(b.data.dtype)
    tiling = kernel.Tiling(*tile)
    return kernel.grouped_mm(a.data, a.scale, data, b.scale, offsets, torch.float32, fast, tiling).numpy()


def gradient(sizes, formats, tile, fast):
    """dw [E, N, K] in float32; run in the interpreter."""
    from octavo.ops.grouped_gemm import row_scaled_kernel as kernel

    h, scale, x_t = gradient_operands(sizes, formats)
    tiling = kernel.Tiling(*tile)
    return kernel.grouped_mm_dw(h, scale, x_t, offsets_of(sizes), torch.float32, fast, tiling).numpy()


def gradient_operands(sizes, formats):
    """h [80, M] and x_t [48, M], with NaN behind the groups, and the scale."""
    torch.manual_seed(0)
    m = sum(sizes)
    h, x_t = (torch.randn(n, m + 16) for n in (80, 48))
    for each in (h, x_t):
        each[:, m:] = torch.nan
    h, x_t = (each.to(FORMATS[fmt]) for each, fmt in zip((h, x_t), formats, strict=True))
    return h, torch.rand(len(sizes), 80, 1) + 0.1, x_t


@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_row_times_the_matrix_of_its_group(kernels, sizes, pair, tile, fast):
    a, b, _ = operands(sizes, 48, 80, SPARE, pair)
    rows = sum(sizes)
    y = kernels.submit(product, sizes, 48, 80, pair, tile, fast, turned=False).result()
    assert worst_row(torch.from_numpy(y[:rows]), exact(a, b, sizes)[:rows]) < 1e-6


@pytest.mark.parametrize(("k", "n"), [(128, 16), (272, 144)])
def test_sizes_of_a_step_and_beyond_and_matrices_in_any_order(kernels, k, n):
    sizes = SIZES["ragged"]
    a, b, _ = operands(sizes, k, n, SPARE)
    for turned in (False, True):
        y = kernels.submit(product, sizes, k, n, "row", TILES[0], True, turned).result()
        assert worst_row(torch.from_numpy(y[: sum(sizes)]), exact(a, b, sizes)[: sum(sizes)]) < 1e-6


@pytest.mark.parametrize("fast", [False, True], ids=["promoted", "fast"])
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")], ids=str)
@pytest.mark.parametrize("sizes", [[16, 0, 48, 16, 272], [0, 0, 64, 0], [32, 16, 144]], ids=str)
def test_the_gradient_of_each_matrix_reduces_over_its_group(kernels, sizes, formats, tile, fast):
    h, scale, x_t = gradient_operands(sizes, formats)
    dw = kernels.submit(gradient, sizes, formats, tile, fast).result()
    wide = exact_dw(h, scale, x_t, sizes)
    assert np.abs(dw - wide).max() <= 1e-6 * np.abs(wide).max()
    assert [e for e in range(len(sizes)) if not dw[e].any()] == [e for e, size in enumerate(sizes) if size == 0]


def test_the_tilings():
    from octavo.ops.grouped_gemm.row_scaled_kernel import tiling_for

    ada, hopper = 99 * 1024, 227 * 1024
    assert tiling_for(1, True, ada) == (64, 16, 4, 4)
    assert tiling_for(64, False, hopper) == (64, 64, 4, 4)
    assert tiling_for(65, True, ada) == tiling_for(1 << 20, True, ada) == (128, 128, 3, 8)
    assert tiling_for(1 << 20, False, hopper) == (128, 128, 4, 8)
    assert tiling_for(1 << 20, True, hopper) == (128, 256, 4, 8)
