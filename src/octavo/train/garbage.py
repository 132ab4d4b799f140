"""Python's garbage collection in a run: every so many steps, and not in the middle of one.

By itself Python collects when enough objects were made. A collection of all the objects of a process that has compiled
a model takes some 0.3 s, in another step of each rank, and all ranks wait for it. Steps leave no tensors in cycles of
references, only small objects, which a collection of the young generations frees in some 10 ms.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

EVERY = 50  # steps


@contextmanager
def collect_between_steps() -> Iterator[None]:
    """Within the block Python collects only in `collect_young`. Before and after it, as the process has chosen."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect_young(step: int) -> None:
    """Free what the last steps left behind, after every 50th: call it after each step, with its number."""
    if step % EVERY == 0:
        gc.collect(1)
