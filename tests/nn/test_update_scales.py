"""`update_scales` computes all histories at once: against one history at a time, in operations, and without waiting."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import octavo
from octavo.nn.delayed import ScaleHistory, histories
from octavo.numerics import Cast, History
from octavo.numerics.granularity import TENSOR
from octavo.numerics.scaling import RULES

STEPS = 12


class Expected:
    """The recent amax values and the scale of one history, step by step."""

    def __init__(self, history: ScaleHistory) -> None:
        self.rule, self.cast = history.rule, history.cast
        self.recent, self.scale, self.steps = torch.zeros(0), torch.zeros(()), 0

    def update(self, amax: float) -> None:
        if amax == 0:
            return
        self.recent = torch.cat([torch.tensor([amax]), self.recent])[: self.rule.length]
        if self.steps % self.rule.interval == 0:
            self.scale = self._chosen() * 2.0**self.rule.margin / torch.tensor(self.cast.fmt.max)
        self.steps += 1

    def _chosen(self) -> Tensor:
        if self.rule.rule == "ema":
            weight = self.rule.beta ** torch.arange(len(self.recent), dtype=torch.float64)
            return ((self.recent * weight).sum() / weight.sum()).float()
        if self.rule.rule == "percentile":
            return torch.quantile(self.recent, self.rule.percentile / 100)
        return self.recent.max() if self.rule.rule == "max" else self.recent[0]


def mixed() -> nn.ModuleList:
    """Histories of all rules, of several lengths, margins and intervals, and of two formats."""
    others = ((4, 0.0, 1), (4, 1.5, 3), (STEPS + 1, -2.0, 2))  # length, margin, interval
    rules = [History(n, rule, 90.0, 0.5, margin, interval) for rule in RULES for n, margin, interval in others]
    casts = [Cast(fmt, TENSOR, history=rule) for rule in rules for fmt in ("e4m3", "e5m2", "e4m3")]
    return nn.ModuleList(ScaleHistory(cast, cast.history, torch.device("cpu")) for cast in casts)


def test_each_history_is_as_if_it_were_alone() -> None:
    torch.manual_seed(0)
    model = mixed()
    found = [history for _, history in histories(model)]
    expected = [Expected(history) for history in found]
    for _ in range(STEPS):
        amax = torch.rand(len(found)) * (torch.rand(len(found)) > 0.3) * 8  # a third is not used in this step
        for history, alone, value in zip(found, expected, amax, strict=True):
            history.pending.fill_(value)
            alone.update(float(value))
        octavo.update_scales(model)
        for history, alone in zip(found, expected, strict=True):
            assert torch.equal(history.recent[: len(alone.recent)], alone.recent)
            assert (history.recent[len(alone.recent) :] == 0).all()
            assert (int(history.steps), history.ready) == (alone.steps, alone.steps > 0)
            bound = 1e-6 if alone.rule.rule == "ema" else 0.0  # its sum runs in another order
            torch.testing.assert_close(history.scale.view(()), alone.scale, rtol=bound, atol=0.0)
            assert float(history.pending) == 0


class Counted(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


def test_the_number_of_operations_does_not_grow_with_the_layers() -> None:
    counts = {}
    for layers in (1, 7):
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(layers)))
        octavo.convert(model, "delayed")
        model(torch.randn(16, 16)).sum().backward()
        with Counted() as counted:
            octavo.update_scales(model)
        counts[layers] = counted.operations
    assert counts[1] == counts[7] < 100


@pytest.mark.parametrize("rule", RULES)
def test_the_host_reads_no_number_once_all_histories_have_a_scale(rule: str) -> None:
    """On the meta device a number cannot be read."""
    recipe = octavo.PRESETS["delayed"]()
    cast = replace(recipe.x, history=History(8, rule))
    model = nn.ModuleList(ScaleHistory(cast, cast.history, torch.device("meta")) for _ in range(3))
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        octavo.update_scales(model)
    for _, history in histories(model):
        history.ready = True
    octavo.update_scales(model)
