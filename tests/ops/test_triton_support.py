"""The devices and tile sizes of the Triton kernels."""

from dataclasses import replace

import pytest
import torch

from octavo.numerics import TENSOR, Cast, block, group
from octavo.ops.launching import LONGEST_ROW, fits, has_kernels, row_tile, some_gpu_rounds_twice


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [([], False), ([(9, 0)], False), ([(8, 9)], True), ([(9, 0), (8, 9)], True), ([(8, 6), (12, 0)], False)],
)
def test_an_ada_among_the_gpus_rounds_twice(capabilities, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device])
    assert some_gpu_rounds_twice.__wrapped__() == expected


@pytest.mark.parametrize("columns", range(0, LONGEST_ROW + 1, 331))
def test_a_row_tile_holds_the_row_and_triton_can_have_it(columns):
    """4096 elements or one row, and no fewer than 16 elements of a row."""
    elements, rows, warps = row_tile(columns)
    assert max(columns, 16) <= elements < 2 * max(columns, 16)
    assert rows == 1 or rows * elements <= 4096
    assert 8 <= warps <= 32
    for n in (elements, rows, warps):
        assert n & (n - 1) == 0


FLOOR = Cast(relative_floor=0.1)


@pytest.mark.parametrize(
    ("cast", "columns", "fit"),
    [
        (Cast(granularity=TENSOR), 10**6, True), (Cast(granularity=TENSOR, relative_floor=0.1), 8, False),
        (Cast(), LONGEST_ROW, True), (Cast(), LONGEST_ROW + 1, False), (Cast(scale="e8m0"), 8, True),
        (FLOOR, LONGEST_ROW, True), (FLOOR, LONGEST_ROW + 1, False), (replace(FLOOR, scale="pow2"), 8, True),
        (replace(FLOOR, scale="e8m0"), 8, False), (Cast(granularity=group(32), scale="e8m0"), 10**6, True),
        (replace(FLOOR, granularity=group(7)), 8, False), (replace(FLOOR, granularity=block(3, 129)), 8, False),
        (Cast(granularity=group(32768)), 8, True), (Cast(granularity=group(32769)), 8, False),
        (Cast(granularity=block(128, 128)), 10**6, True), (Cast(granularity=block(256, 128)), 8, True),
        (Cast(granularity=block(256, 129)), 8, False),
    ],
    ids=str,
)  # fmt: skip
def test_fits(cast, columns, fit):
    assert fits(cast, columns) == fit


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_there_are_no_kernels_without_a_gpu(device):
    assert not has_kernels(torch.device(device))


# ---- on a GPU


@pytest.mark.gpu
def test_kernels_run_from_compute_capability_8_9():
    device = torch.empty(0, device="cuda").device
    assert has_kernels(device) == (torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9))
