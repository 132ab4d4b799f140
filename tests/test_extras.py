"""What is said where a package of an extra is not installed."""

import math
import tomllib
from pathlib import Path

import pytest

from octavo.extras import import_extra

ROOT = Path(__file__).parents[1]


def test_a_module_that_is_there_is_imported():
    assert import_extra("math", "hf", "sums need math") is math


def test_a_missing_module_says_what_needs_it_and_how_to_install_it_from_a_clone():
    with pytest.raises(ImportError, match=r"^text needs nowhere, and .*No module named 'nowhere'.*") as raised:
        import_extra("nowhere", "hf", "text needs nowhere")
    assert 'pip install ".[hf]"' in str(raised.value)


def test_no_message_installs_octavo_from_an_index():
    """It is on none: pip finds no distribution of that name."""
    sources = [path for path in (ROOT / "src").rglob("*.py") if "install" in path.read_text()]
    assert sources
    assert [str(path) for path in sources if 'install "octavo' in path.read_text()] == []


def test_every_extra_that_is_named_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"hf", "gguf", "bpe", "tensorboard"} <= extras.keys()
