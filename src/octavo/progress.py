"""The function by which long work reports its progress."""

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""progress(done, total, doing): `done` of `total` pieces are done of the work that `doing` names, such as "packing"."""


def no_progress(done: int, total: int, doing: str) -> None:
    """Report to nobody."""
