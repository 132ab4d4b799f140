"""The kernels with scales along K, whose tiles are loaded by descriptors: equal bits with those loaded by pointers."""

from importlib import import_module

import numpy as np
import pytest
import torch
from gemm_examples import operands
from grouped_examples import SIZES, quantized_columns
from grouped_examples import operands as grouped_operands
from test_kernels_compile import HALF, compiled_for, on_cpu

from octavo.numerics import block, group
from octavo.ops.launching import Operands

pytest.importorskip("triton")
pytestmark = pytest.mark.triton


TAKE = {"block_scaled_gemm": "take_descriptors", "grouped_gemm": "take_blocks_by_descriptors"}


def both(file, function, *given):
    """The bits of the result by pointers and by descriptors; run in the interpreter. The last is the tile."""
    *given, tile = given
    kernel = import_module(f"octavo.ops.kernels.{file}")
    made, plain, results = [], kernel.descriptor, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, TAKE[file], lambda *operands: True)
        patch.setattr(kernel, "descriptor", lambda *args: made.append(args) or plain(*args))
        for described in (False, True):
            results.append(getattr(kernel, function)(*given, kernel.Tiling(*tile, described)).numpy().view(np.int32))
            assert len(made) == 2 * described
    return results


def product(pair, size, tile):
    a, b = operands(pair, *size)
    bias, residual = torch.arange(size[2]).float(), torch.ones(size[0], size[2])
    return both("block_scaled_gemm", "scaled_mm", Operands.of(a, b), bias, torch.float32, residual, tile)


@pytest.mark.parametrize(
    ("pair", "tile"),
    [
        ("group32", (32, 64, 2, 2, 4, 1)),
        ("group32", (64, 64, 4, 2, 4, 3)),
        ("group64-e5m2", (32, 16, 2, 2, 4, 1)),
        ("mx", (64, 32, 2, 2, 4, 1)),
        ("strip-strip", (64, 32, 1, 2, 4, 2)),
        ("strip-square", (64, 64, 2, 2, 4, 1)),
        ("strip-square", (32, 16, 1, 2, 4, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [(70, 256, 130), (65, 144, 72), (70, 200, 40)], ids=str)
def test_one_matrix(kernels, pair, tile, size):
    """K of whole steps, with a part of a group at its end, and with rows that are padded."""
    by_pointers, by_descriptors = kernels.submit(product, pair, size, tile).result()
    assert np.array_equal(by_pointers, by_descriptors)
    assert by_pointers.any()


def grouped(sizes, pair, turned, tile):
    a, b, offsets = grouped_operands(sizes, 256, 144, 3, pair)
    data = b.data
    if turned:  # [E, N, K] with the strides of [N, E, K], as dx gets it
        data = data.view(torch.uint8).transpose(0, 1).contiguous().transpose(0, 1).view(data.dtype)
    given = Operands.of(a, b)._replace(b=data), offsets, torch.float32, False, tile
    return [y[: sum(sizes)] for y in both("grouped_gemm", "grouped_mm", *given)]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("pair", "tile"), [("strip-square", (64, 64, 2, 2, 4, 1)), ("mx", (32, 64, 4, 2, 4, 1))], ids=str
)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_groups_of_rows(kernels, sizes, pair, tile, turned):
    by_pointers, by_descriptors = kernels.submit(grouped, sizes, pair, turned, tile).result()
    assert np.array_equal(by_pointers, by_descriptors)
    assert by_pointers.any()


def gradient(sizes, pair, tile):
    a, b, offsets = quantized_columns(sizes, pair)
    return both("grouped_gemm", "grouped_mm_dw", Operands.of(a, b), offsets, torch.float32, False, tile)


@pytest.mark.parametrize(
    ("pair", "tile"), [("strip-strip", (16, 64, 1, 2, 4, 1)), ("mx", (64, 32, 1, 2, 4, 1))], ids=str
)
def test_groups_of_columns(kernels, pair, tile):
    by_pointers, by_descriptors = kernels.submit(gradient, [128, 0, 256], pair, tile).result()
    assert np.array_equal(by_pointers, by_descriptors)
    assert by_pointers.any()


GROUPS = [(group(size), group(size)) for size in (32, 64, 128)]
BLOCKS = group(128), block(128, 128)
CASES = [
    *(("scaled_mm", pair) for pair in (*GROUPS, BLOCKS)),
    *(("grouped_mm", pair) for pair in (*GROUPS, BLOCKS)),
    *(("grouped_mm_dw", pair) for pair in GROUPS),
]


@pytest.mark.parametrize(("function", "pair"), CASES, ids=str)
def test_the_copy_engine_loads_the_tiles(function, pair, monkeypatch):
    """Those of the chosen tilings, which fit."""
    file = "block_scaled_gemm" if function == "scaled_mm" else "grouped_gemm"
    kernel, compiled = compiled_for(90, file, monkeypatch)
    monkeypatch.setattr(kernel, TAKE[file], lambda *operands: bool(compiled))  # not the first
    a, b, offsets = on_cpu(4096, 2048), on_cpu(*(8,) * (function == "grouped_mm"), 512, 2048), torch.zeros(8).int()
    scales = (torch.ones(by.scale_shape(t.shape)) for by, t in zip(pair, (a, b), strict=True))
    rest = (None, HALF) if function == "scaled_mm" else (offsets, HALF, False)
    operands = Operands(a, b, *scales, *pair)
    for _ in range(2):
        getattr(kernel, function)(operands, *rest)
    assert compiled.fit()
    found = [[word in each.asm["ptx"] for word in ("cp.async.bulk.tensor", "wgmma")] for each in compiled]
    assert found == [[False, True], [True, True]]
