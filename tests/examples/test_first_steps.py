"""examples/first_steps.ipynb runs from its first cell to its last, and holds no output of an earlier run."""

import json
from pathlib import Path

import pytest


@pytest.mark.parametrize("steps", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_the_cells_run(monkeypatch, tmp_path, capsys, steps):
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    names = {"__name__": "__main__"}
    notebook = json.loads((Path(__file__).parents[2] / "examples" / "first_steps.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        exec(compile("".join(cell["source"]).replace("steps=60", f"steps={steps}"), f"cell {number}", "exec"), names)
        assert cell["outputs"] == []
    assert "14 linear layers converted" in capsys.readouterr().out
    assert abs(names["ours"] / names["base"] - 1) < 0.05
    assert (tmp_path / "packed" / "model.safetensors").is_file()
