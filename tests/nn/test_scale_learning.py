"""Scales from batches: learning in evaluation mode, freezing, and seeding from a calibration."""

import pytest
import torch
from torch import nn

import octavo
from octavo.numerics import History
from octavo.recipe import delayed


def make(history: History | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    octavo.convert(model, delayed(history=history))
    return model


def rows(size: float, count: int = 8) -> torch.Tensor:
    return torch.randn(count, 32).clamp(-0.9, 0.9) * size + size * 0.1 * torch.eye(count, 32)


class Calibration:
    def __init__(self, **histories):
        self.input_histories = histories


def test_histories_learn_in_evaluation_where_asked():
    model = make().eval()
    x = rows(3.0)
    with octavo.learn_scales(model):
        model(x)
    octavo.update_scales(model)
    history = model[0].histories["x"]
    assert float(history.recent[0]) == float(x.abs().max())
    assert (history.steps, history.ready) == (1, True)
    model(1000 * x)
    octavo.update_scales(model)
    assert history.steps == 1, "outside of the block evaluation leaves no trace"


def test_frozen_scales_are_those_of_the_batches_and_stay():
    model = make(History(margin=1.0))
    batches = [rows(1.0), rows(4.0), rows(2.0)]
    scales = octavo.freeze_scales(model, batches)
    assert scales.keys() == {"0", "2"}
    largest = max(float(batch.abs().max()) for batch in batches)
    assert float(scales["0"]) == pytest.approx(2 * largest / 448)
    assert scales["0"].shape == (1,)
    assert model.training, "the mode is as before"
    before = octavo.scale_state(model)["0.histories.x.scale"].clone()
    model(rows(100.0)).sum().backward()
    octavo.update_scales(model)
    after = octavo.scale_state(model)
    assert torch.equal(after["0.histories.x.scale"], before)
    weight = model[0].weight.detach().abs().max()
    assert float(after["0.histories.w.scale"]) == pytest.approx(2 * float(weight) / 448)


def test_a_frozen_row_gives_the_same_bits_in_every_call_and_batch():
    model = make()
    octavo.freeze_scales(model, [rows(1.0)])
    model.eval()
    x = rows(1.0)
    alone = model(x)
    beside = model(torch.cat([x, rows(1000.0)]))[: len(x)]
    assert torch.equal(alone, model(x))
    torch.testing.assert_close(alone, beside, rtol=1e-6, atol=1e-6)
    dynamic = make().eval()  # without scales, each batch has its own
    assert (dynamic(x) - dynamic(torch.cat([x, rows(1000.0)]))[: len(x)]).abs().max() > 1e-3


def test_what_saturates_is_counted():
    model = make(History())
    with pytest.raises(ValueError, match="no layer of Sequential holds a scale of its input"):
        octavo.saturation(model, [rows(1.0)])
    x = rows(1.0)
    octavo.freeze_scales(model, [x])
    assert octavo.saturation(model, [x, x[:2]]) == {"0": 0, "2": 0}
    limit = float(x.abs().max())
    wide = 3 * x
    expected = int((wide.abs() > limit).sum()) / (2 * wide.numel())
    assert octavo.saturation(model, [x, wide])["0"] == pytest.approx(expected)
    assert model.training


def test_batches_are_tensors_tuples_or_mappings():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 16)

        def forward(self, x, *, factor=1.0):
            return self.linear(x * factor)

    model = Model()
    octavo.convert(model, "delayed")
    scales = octavo.freeze_scales(
        model, [torch.ones(2, 32), (torch.ones(2, 32),), {"x": torch.ones(2, 32), "factor": 7}]
    )
    assert float(scales["linear"]) == pytest.approx(2 * 7 / 448)


def test_what_cannot_be_frozen():
    rowwise = nn.Sequential(nn.Linear(32, 16))
    octavo.convert(rowwise, "rowwise")
    with pytest.raises(ValueError, match=r"no layer whose scales can be frozen: octavo.convert\(model, 'delayed'\)"):
        octavo.freeze_scales(rowwise, [rows(1.0)])
    with pytest.raises(ValueError, match=r"0 \(2 such layers\) saw no input"):
        octavo.freeze_scales(make(), [])
    for bad in (torch.zeros(2, 32), torch.full((2, 32), torch.inf)):
        with pytest.raises(ValueError, match="the input of 0 holds inf or NaN, or zeros alone"):
            octavo.freeze_scales(make(), [bad])


def test_a_calibration_begins_the_histories():
    model = make(History(length=3))
    octavo.seed_scales(model, Calibration(**{"0": [9.0, 1.0, 4.0, 2.0], "2": [5.0]}))
    x, w, dy = (model[0].histories[name] for name in ("x", "w", "dy"))
    assert x.recent.tolist() == [2.0, 4.0, 1.0]  # the newest first; 9 is too old
    assert (x.steps, float(x.scale) * 448) == (3, pytest.approx(4.0))
    assert float(w.recent[0]) == float(model[0].weight.detach().abs().max())
    assert (dy.ready, dy.steps) == (False, 0)
    assert float(model[2].histories["x"].scale) * 448 == pytest.approx(5.0)
    model(rows(3.0)).sum().backward()
    octavo.update_scales(model)
    assert x.recent[1:].tolist() == [2.0, 4.0]  # training goes on from there


def test_a_calibration_of_other_layers_is_refused_and_nothing_changes():
    model = make()
    with pytest.raises(ValueError, match="the calibration has no amax of the input of 2"):
        octavo.seed_scales(model, Calibration(**{"0": [9.0]}))
    assert not model[0].histories["x"].ready
    with pytest.raises(ValueError, match="has no scale histories"):
        octavo.seed_scales(nn.Sequential(nn.Linear(4, 4)), Calibration())
