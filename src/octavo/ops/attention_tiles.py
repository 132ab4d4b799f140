"""The tiles of the attention over a cache, by the shared memory of a GPU.

A program holds in shared memory the loads in flight of keys and values, one block of them widened to float16, the
queries and the block's probabilities. A Hopper has 227 KiB for a program, Ada and RTX Blackwell have 99 KiB.
"""

from typing import NamedTuple


class Tile(NamedTuple):
    """Tokens of a block, warps of a program, stages of the loop, which has one load less in flight, and programs that
    run on a multiprocessor at a time."""

    block_n: int
    warps: int
    stages: int
    programs: int = 2


# Bytes of a stored element -> the tiles to choose from, the fastest on an H200 first.
TILES: dict[int, tuple[Tile, ...]] = {
    1: (Tile(64, 2, 3, programs=4), Tile(64, 4, 2), Tile(32, 4, 2)),
    2: (Tile(64, 4, 3), Tile(64, 4, 2), Tile(32, 4, 2)),
}
# Of two bytes, for up to 16 queries: where the tokens need not be split, of which 512 heads are one wave in place of
# two, and where they are split.
MANY, FEW = Tile(64, 2, 2, programs=4), Tile(16, 1, 3, programs=4)


def choose_tile(element_size: int, block_m: int, block_d: int, limit: int, *, many: bool = False) -> Tile:
    """The first tile that fits `limit` bytes of shared memory, for `block_m` queries and heads of `block_d`, padded.

    `many` says that a program for each head of each sequence is enough for all multiprocessors.
    """
    tiles = TILES[element_size]
    if element_size == 2 and (many or (block_m == 16 and block_d <= 128)):
        tiles = (MANY if many else FEW, *tiles[1:])
    return next((tile for tile in tiles if shared_bytes(tile, element_size, block_m, block_d) <= limit), tiles[-1])


def shared_bytes(tile: Tile, element_size: int, block_m: int, block_d: int) -> int:
    """Bytes of shared memory of a program."""
    block = tile.block_n * block_d
    in_flight = (tile.stages - 1) * 2 * block * element_size  # of keys and of values
    widened = 2 * block if element_size == 1 else 0
    probabilities = tile.block_n if tile.warps > 1 else 0  # a warp by itself keeps them in registers
    return in_flight + widened + 2 * block_m * (block_d + probabilities)


# ---- The number of parts that the tokens of a cache are split into, so that every multiprocessor has work.


def splits_of(pairs: int, capacity: int, block_n: int, programs: int) -> int:
    """The number of parts for `pairs` heads of sequences with `capacity` tokens, `programs` running at a time.

    The smallest number whose last wave leaves at most a tenth of the device idle; if there is none, the one that leaves
    the least idle.
    """
    most = max(1, min(128, capacity // block_n))

    def busy(splits: int) -> float:
        return pairs * splits / (-(-pairs * splits // programs) * programs)

    return next((splits for splits in range(1, most + 1) if busy(splits) >= 0.9), max(range(1, most + 1), key=busy))
