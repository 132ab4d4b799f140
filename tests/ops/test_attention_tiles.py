"""The tiles of the attention over a cache fit into the shared memory of each GPU."""

import pytest

from octavo.ops.attention import MAX_DIM, MAX_ROWS
from octavo.ops.attention_tiles import TILES, choose_tile, shared_bytes

ADA, HOPPER = 99 * 1024, 227 * 1024


@pytest.mark.parametrize("size", TILES)
def test_the_largest_heads_fit_on_ada_and_rtx_blackwell(size):
    for block_d in (64, 128, MAX_DIM):
        for block_m in (16, MAX_ROWS):
            tile = choose_tile(size, block_m, block_d, ADA)
            assert shared_bytes(tile, size, block_m, block_d) <= ADA


@pytest.mark.parametrize("size", TILES)
def test_a_hopper_takes_the_fastest(size):
    for block_d in (64, 128, MAX_DIM):
        assert choose_tile(size, MAX_ROWS, block_d, HOPPER) == TILES[size][0]


def test_tiles_shrink_along_the_list():
    for size, tiles in TILES.items():
        needs = [shared_bytes(tile, size, 16, 128) for tile in tiles]
        assert needs == sorted(needs, reverse=True)


def test_what_triton_allocates():
    """Counted by Triton 3.6 for 8.9 and 12.0; tests/ops/test_shared_memory.py compiles the kernels themselves."""
    assert shared_bytes(TILES[1][0], 1, 16, 128) == 106_496
    assert shared_bytes(TILES[1][0], 1, 32, 256) == 221_184
    assert shared_bytes(TILES[2][0], 2, 16, 256) == 141_312
