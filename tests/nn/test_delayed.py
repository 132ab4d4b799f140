"""Delayed scaling: a step reads the scale and records amax; the scale changes in `update_scales`."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import octavo
from octavo.numerics import History
from octavo.recipe import delayed


def make(history: History | None = None) -> tuple[nn.Sequential, octavo.Linear]:
    model = nn.Sequential(nn.Linear(32, 48, bias=False))
    octavo.convert(model, delayed(history=history))
    return model, model[0]


def step(model: nn.Sequential, size: float) -> float:
    """One training step whose input has the amax `size`; returns the scale of x used next."""
    x = torch.rand(16, 32).clamp(max=0.99) * size
    x[3, 4] = -size
    model(x).sum().backward()
    octavo.update_scales(model)
    return float(model[0].histories["x"].scale)


def test_the_scale_follows_the_largest_of_the_history() -> None:
    model, _ = make(History(length=3))
    scales = [step(model, size) for size in (1.0, 8.0, 2.0, 2.0, 2.0)]
    torch.testing.assert_close(torch.tensor(scales) * 448, torch.tensor([1.0, 8.0, 8.0, 8.0, 2.0]))


def test_all_three_operands_keep_a_history() -> None:
    model, linear = make()
    step(model, 2.0)
    seen = {name: float(h.recent[0]) for name, h in linear.histories.items()}
    assert seen["x"] == 2.0
    assert seen["w"] == float(linear.weight.detach().abs().max())
    assert seen["dy"] == 1.0
    assert linear.histories["dy"].cast.format == "e5m2"


def test_a_scale_holds_for_the_interval() -> None:
    model, linear = make(History(rule="most_recent", interval=2))
    assert [round(step(model, size) * 448, 4) for size in (1.0, 2.0, 4.0, 8.0)] == [1.0, 1.0, 4.0, 4.0]
    assert linear.histories["x"].recent[:4].tolist() == [8.0, 4.0, 2.0, 1.0]


def test_micro_batches_share_a_scale_and_pool_their_amax() -> None:
    model, linear = make()
    step(model, 1.0)
    history = linear.histories["x"]
    before = history.scale.clone()
    for size in (2.0, 5.0, 3.0):
        model(torch.full((4, 32), size)).sum().backward()
        assert torch.equal(history.scale, before)
    octavo.update_scales(model)
    assert history.recent[:2].tolist() == [5.0, 1.0]


def test_what_outgrew_the_history_saturates() -> None:
    model, linear = make(History())
    step(model, 1.0)
    x = torch.zeros(1, 32)
    x[0, 0] = 64.0
    y = model(x)
    torch.testing.assert_close(y[0], linear.weight[:, 0], rtol=0.07, atol=1e-3)  # 64 came through as 1


def test_the_default_margin_leaves_room_for_twice_the_amax() -> None:
    model, linear = make()
    step(model, 1.0)
    x = torch.zeros(1, 32)
    x[0, 0] = 2.0
    torch.testing.assert_close(model(x)[0], 2 * linear.weight[:, 0], rtol=0.07, atol=1e-3)


def test_evaluation_reads_the_scale_and_leaves_no_trace() -> None:
    model, linear = make()
    step(model, 1.0)
    model.eval()
    model(torch.full((4, 32), 100.0))
    assert float(linear.histories["x"].pending) == 0
    model.train()
    octavo.update_scales(model)
    assert linear.histories["x"].steps == 1  # nothing was met, so no step is counted


def test_before_any_training_evaluation_scales_by_each_tensor_itself() -> None:
    model, linear = make()
    dynamic = nn.Sequential(nn.Linear(32, 48, bias=False)).eval()
    dynamic[0].weight = linear.weight
    octavo.convert(dynamic, "tensorwise")
    model.eval()
    for size in (1.0, 100.0):
        x = torch.randn(4, 32) * size
        assert torch.equal(model(x), dynamic(x))
        octavo.update_scales(model)
    assert linear.histories["x"].steps == 0


def test_a_non_finite_step_leaves_no_trace() -> None:
    model, linear = make()
    step(model, 1.0)
    x = torch.ones(4, 32)
    x[0, 0] = torch.inf
    assert not model(x)[0].isfinite().any()
    octavo.update_scales(model)
    assert linear.histories["x"].recent[:2].tolist() == [1.0, 0.0]


def test_state_round_trips_and_is_checked() -> None:
    model, _ = make(History(length=4))
    for size in (1.0, 3.0):
        step(model, size)
    state = {name: t.clone() for name, t in octavo.scale_state(model).items()}
    other, _ = make(History(length=4))
    octavo.load_scale_state(other, state)
    assert octavo.scale_state(other).keys() == state.keys()
    assert all(torch.equal(t, state[name]) for name, t in octavo.scale_state(other).items())
    with pytest.raises(ValueError, match="missing"):
        octavo.load_scale_state(other, {})
    with pytest.raises(ValueError, match="belongs to no layer"):
        octavo.load_scale_state(other, state | {"9.histories.x.scale": torch.ones(1)})
    with pytest.raises(ValueError, match="shape"):
        octavo.load_scale_state(make(History(length=5))[0], state)


def test_other_recipes_have_nothing_to_update() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    octavo.convert(model, replace(octavo.PRESETS["tensorwise"](), name="mine"))
    octavo.update_scales(model)
    assert octavo.scale_state(model) == {}


def test_a_cast_of_the_model_leaves_the_scales_as_they_are() -> None:
    model, layer = make()
    step(model, 3.0)
    before = octavo.scale_state(model)
    model.bfloat16()
    after = octavo.scale_state(model)
    assert {name: t.dtype for name, t in after.items()} == {name: t.dtype for name, t in before.items()}
    assert all(torch.equal(after[name], t) for name, t in before.items())
    assert layer(torch.rand(16, 32).bfloat16()).dtype == torch.bfloat16
