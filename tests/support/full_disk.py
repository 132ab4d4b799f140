"""Files that cannot grow, as on a disk that is full."""

import resource
from contextlib import contextmanager


@contextmanager
def files_of_at_most(size: int):
    """In this block no file may grow beyond `size` bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
