"""The errors that the command line shows as a message, and those that it leaves to Python."""

import sys

import pytest


def test_a_missing_module_is_shown_with_the_package_that_imports_it(octavo, monkeypatch):
    monkeypatch.setitem(sys.modules, "octavo.numerics.formats", None)  # as if it were not installed
    with pytest.raises(ModuleNotFoundError, match=r"octavo\.numerics\.formats"):
        octavo("formats", "0.1")
