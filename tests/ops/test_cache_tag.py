"""The tag by which compiled code on disk is found again."""

import os
import subprocess
import sys
from pathlib import Path

import torch

import octavo
from octavo.ops.registration import source_version


def test_the_version_changes_with_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ops" / "kernel.py"
    file.parent.mkdir()
    file.touch()
    before = source_version(tmp_path)
    assert source_version(tmp_path) == before
    os.utime(file, ns=(0, 1))
    assert source_version(tmp_path) != before


def test_the_tag_of_compiled_graphs_has_the_version() -> None:
    assert source_version(Path(octavo.__file__).parent) in torch.compiler.config.cache_key_tag


def test_a_tag_of_the_user_is_preserved() -> None:
    code = "import octavo.ops.registration, torch; print(torch.compiler.config.cache_key_tag)"
    run = [sys.executable, "-c", code]
    tag = subprocess.check_output(run, env=os.environ | {"TORCH_COMPILE_CACHE_KEY_TAG": "mine"}, text=True)
    assert tag.startswith("mine octavo ")
