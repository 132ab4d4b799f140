"""Shared by all tests: those marked gpu need a device, and every test starts from the same seed."""

import os
from pathlib import Path

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the processes share the cores; with a thread for each core in each they are far slower


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With -m gpu a file without such a test is not imported: a GPU machine may lack what it needs."""
    only_gpu = config.getoption("markexpr") == "gpu" and collection_path.name.startswith("test_")
    is_file = only_gpu and collection_path.suffix == ".py"
    return True if is_file and "mark.gpu" not in collection_path.read_text() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
