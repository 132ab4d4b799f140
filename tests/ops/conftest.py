"""The interpreter of kernels, for the tests of a file."""

import pytest
from interpreted_triton import interpreter


@pytest.fixture(scope="module")
def kernels():
    """A process that interprets the kernels of functions that are submitted to it."""
    pytest.importorskip("triton")
    with interpreter() as pool:
        yield pool
