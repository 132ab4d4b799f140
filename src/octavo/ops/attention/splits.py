"""Into how many parts the tokens of a cache are cut, so that every multiprocessor has work."""

from __future__ import annotations

MOST_SPLITS = 128


def splits_of(pairs: int, room: int, tile: int, programs: int) -> int:
    """Into how many parts to cut `room` tokens for `pairs` heads of sequences, `programs` running at a time: the fewest
    whose last wave leaves at most a tenth of the device idle, else those that leave least."""
    most = max(1, min(MOST_SPLITS, room // tile))

    def busy(splits: int) -> float:
        return pairs * splits / (-(-pairs * splits // programs) * programs)

    return next((splits for splits in range(1, most + 1) if busy(splits) >= 0.9), max(range(1, most + 1), key=busy))
