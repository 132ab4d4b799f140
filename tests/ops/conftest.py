"""The interpreter of kernels, for the tests of a file."""

from collections.abc import Iterator
from concurrent.futures import Executor

import pytest
from interpreted_triton import interpreter


@pytest.fixture(scope="module")
def kernels() -> Iterator[Executor]:
    """A process that interprets the kernels of functions that are submitted to it."""
    pytest.importorskip("triton")
    with interpreter() as pool:
        yield pool
