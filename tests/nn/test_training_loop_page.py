"""The code of docs/training_loop.md runs, block after block."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "training_loop.md"


def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert "2 linear layers converted" in capsys.readouterr().out
