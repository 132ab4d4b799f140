"""The margin of `delayed` in a small run: x and w do not saturate, and dy hardly does (docs/decisions.md)."""

from collections import defaultdict

import pytest

from octavo import PRESETS, History
from octavo.nn import linear_function
from octavo.nn.delayed import histories
from octavo.recipe import delayed


@pytest.fixture
def saturated(monkeypatch):
    """saturated(trainer, steps): the mean share of the elements that saturate in `steps` steps, by operand."""
    quantize_by = linear_function._quantize_by

    def measure(trainer, steps):
        operand = {id(history): name.rpartition(".")[2] for name, history in histories(trainer.model)}
        shares = defaultdict(list)

        def count(history, t, cast):
            if history.ready:
                limit = float(history.scale) * cast.fmt.max * (1 + 2**-23)
                shares[operand[id(history)]].append(float((t.detach().abs() > limit).float().mean()))
            return quantize_by(history, t, cast)

        monkeypatch.setattr(linear_function, "_quantize_by", count)
        with trainer.lock:
            for _ in range(steps):
                trainer.step()
        return {name: sum(found) / len(found) for name, found in shares.items()}

    return measure


@pytest.mark.slow
def test_the_default_margin_keeps_inputs_and_weights_from_saturating(begin, saturated, monkeypatch, tmp_path):
    rates = {"steps": 40, "learning_rate": 3e-3}
    with_margin = saturated(begin(recipe="delayed", **rates), 40)
    assert (with_margin["x"], with_margin["w"]) == (0, 0)
    assert with_margin["dy"] < 1e-4
    monkeypatch.setitem(PRESETS, "no_margin", lambda: delayed(history=History()))
    without = saturated(begin(recipe="no_margin", out=str(tmp_path / "other"), **rates), 40)
    assert without["w"] > 1e-5
    assert without["x"] > 1e-5
    assert without["dy"] > 5 * with_margin["dy"]
