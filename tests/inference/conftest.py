"""Packed folders that several files of tests share."""

from pathlib import Path

import pytest
from runtime_examples import ARCHITECTURES, make_model

from octavo.packing import pack


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each architecture, packed; not to be changed."""
    root = tmp_path_factory.mktemp("models")
    for name in ARCHITECTURES:
        make_model(name).save_pretrained(root / name)
        pack(root / name, root / f"{name} packed")
    return {name: root / f"{name} packed" for name in ARCHITECTURES}
