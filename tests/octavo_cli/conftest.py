"""The command line, called within this process."""

import sys

import pytest
import torch

from octavo_cli import main


@pytest.fixture
def octavo(monkeypatch, capsys):
    """octavo(*words): (exit code, standard output, standard error) of that command."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["octavo", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "1000")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # products of a few thousand elements wait for a second one longer than they take
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            torch.set_num_threads(threads)
        return (ended.value.code, *capsys.readouterr())

    return call
