"""The number of parts that the tokens of a cache are split into, so that every multiprocessor has work."""

from __future__ import annotations

from functools import cache

MAX_SPLITS = 128


@cache
def splits_of(pairs: int, capacity: int, block_n: int, programs: int) -> int:
    """The number of parts for `pairs` heads of sequences with `capacity` tokens, `programs` running at a time.

    The smallest number whose last wave leaves at most a tenth of the device idle; if there is none, the one that leaves
    the least idle.
    """
    most = max(1, min(MAX_SPLITS, capacity // block_n))

    def busy(splits: int) -> float:
        return pairs * splits / (-(-pairs * splits // programs) * programs)

    return next((splits for splits in range(1, most + 1) if busy(splits) >= 0.9), max(range(1, most + 1), key=busy))
