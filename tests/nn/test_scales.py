"""Delayed scaling: a step reads the scale and records amax; the scale changes in `update_scales`."""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from gpus import no_waits
from linear_examples import converted_model
from operation_counts import operations
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import octavo
from octavo.integrations.transformers import ScaleUpdates
from octavo.nn.delayed import ScaleHistory, histories
from octavo.numerics import TENSOR, Cast, History
from octavo.numerics.scaling import RULES
from octavo.recipe import delayed


def make(history: History | None = None) -> tuple[nn.Sequential, octavo.Linear]:
    model = converted_model(nn.Sequential(nn.Linear(32, 48, bias=False)), delayed(history=history))
    return model, model[0]


def step(model: nn.Sequential, size: float) -> float:
    """One training step whose input has the amax `size`; returns the scale of x used next."""
    x = torch.rand(16, 32).clamp(max=0.99) * size
    x[3, 4] = -size
    model(x).sum().backward()
    octavo.scales.update_scales(model)
    return float(model[0].histories["x"].scale)


def test_all_three_operands_keep_a_history() -> None:
    model, linear = make()
    step(model, 2.0)
    seen = {name: float(h.recent[0]) for name, h in linear.histories.items()}
    assert seen == {"x": 2.0, "w": float(linear.weight.detach().abs().max()), "dy": 1.0}
    assert linear.histories["dy"].cast.format == "e5m2"


def test_micro_batches_share_a_scale_and_pool_their_amax() -> None:
    model, linear = make()
    step(model, 1.0)
    history = linear.histories["x"]
    before = history.scale.clone()
    for size in (2.0, 5.0, 3.0):
        model(torch.full((4, 32), size)).sum().backward()
        assert torch.equal(history.scale, before)
    octavo.scales.update_scales(model)
    assert history.recent[:2].tolist() == [5.0, 1.0]


def train_copy(rank: int) -> list[float]:
    """A step in a loop of one's own, and one as the Trainer of transformers ends it, of a model with a wrapper."""
    model, linear = make()
    copy = nn.parallel.DistributedDataParallel(nn.Sequential(model))
    ended_by_trainer = partial(ScaleUpdates().on_optimizer_step, model=model)
    for update in (partial(octavo.scales.update_scales, torch.compile(copy)), ended_by_trainer):
        for size in (1.0 + 8 * rank, 2.0):
            copy(torch.full((4, 32), size)).sum().backward()  # without no_sync, DDP broadcasts buffers before it
        update()
    return linear.histories["x"].recent[:2].tolist()


def test_the_copies_of_ddp_share_the_largest_values() -> None:
    assert run_ranks(2, train_copy) == [[9.0, 9.0], [9.0, 9.0]]


def test_what_outgrew_the_history_saturates() -> None:
    model, linear = make(History(margin=0.0))
    step(model, 1.0)
    x = torch.zeros(1, 32)
    x[0, 0] = 64.0
    y = model(x)
    torch.testing.assert_close(y[0], linear.weight[:, 0], rtol=0.07, atol=1e-3)  # 64 came through as 1


def test_before_any_training_evaluation_scales_by_each_tensor_itself() -> None:
    """In a model that was in evaluation mode when it was converted, as those of `from_pretrained` are."""
    model = converted_model(nn.Sequential(nn.Linear(32, 48, bias=False)).eval(), "delayed")
    dynamic = nn.Sequential(nn.Linear(32, 48, bias=False)).eval()
    dynamic[0].weight = model[0].weight
    octavo.convert(dynamic, "tensorwise")
    for size in (1.0, 100.0):
        x = torch.randn(4, 32) * size
        assert torch.equal(model(x), dynamic(x))
        octavo.scales.update_scales(model)
    assert model[0].histories["x"].steps == 0


@pytest.mark.parametrize(("size", "skipped"), [(torch.inf, None), (9.0, torch.tensor(True)), (9.0, True)])
def test_a_step_that_is_not_finite_or_skipped_leaves_no_trace(size: float, skipped: torch.Tensor | bool | None) -> None:
    model, linear = make()
    step(model, 1.0)
    x = torch.ones(4, 32)
    x[0, 0] = size
    assert bool(model(x)[0].isfinite().any()) == (size < torch.inf)
    octavo.scales.update_scales(model, skipped=skipped)
    assert [*linear.histories["x"].recent[:2].tolist(), float(linear.histories["x"].pending)] == [1.0, 0.0, 0.0]


def test_state_round_trips_and_is_checked() -> None:
    model, _ = make(History(length=4))
    for size in (1.0, 3.0):
        step(model, size)
    state = {name: t.clone() for name, t in octavo.scales.scale_state(model).items()}
    other = checkpoint_wrapper(make(History(length=4))[0])  # the names are those of the model inside
    octavo.scales.load_scale_state(other, state)
    torch.testing.assert_close(octavo.scales.scale_state(other), state, rtol=0, atol=0)
    extra = state | {"9.histories.x.scale": torch.ones(1)}
    for wrong, words in (({}, "missing"), (extra, "has no place"), (None, "takes a dictionary, got NoneType")):
        with pytest.raises((TypeError, ValueError), match=words):
            octavo.scales.load_scale_state(other, wrong)
    with pytest.raises(ValueError, match="shape"):
        octavo.scales.load_scale_state(make(History(length=5))[0], state)


def test_a_cast_and_another_conversion_of_the_model_leave_the_scales_as_they_are() -> None:
    model, layer = make()
    step(model, 3.0)
    before = deepcopy(octavo.scales.scale_state(model))
    octavo.convert(model.bfloat16(), "delayed")
    torch.testing.assert_close(octavo.scales.scale_state(model), before, rtol=0, atol=0)  # values and dtypes
    assert layer(torch.rand(16, 32).bfloat16()).dtype == torch.bfloat16


def test_weights_that_are_assigned_take_the_histories_off_the_meta_device() -> None:
    """Those of a model that was trained before are lost there, and begin anew."""
    with torch.device("meta"):
        model, _ = make()
    trained, plain = make()[0], nn.Sequential(nn.Linear(32, 48, bias=False))
    step(trained, 9.0)
    for each in (model, trained.to("meta")):
        each.load_state_dict(plain.state_dict(), assign=True)
    octavo.convert(plain, "delayed")
    found = [[each(torch.ones(4, 32)).sum(), step(each, 2.0), step(each, 3.0)] for each in (model, trained, plain)]
    assert found[0] == found[1] == found[2]


def test_a_model_converted_in_inference_mode_trains():
    """Its histories are not tensors of inference, which training cannot change."""
    found = []
    for mode in (torch.inference_mode(), torch.enable_grad()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48))
        with mode:
            octavo.convert(model, "delayed")
        scales = [step(model, size) for size in (2.0, 3.0)]
        found.append([torch.tensor(scales), model[0].weight.grad, *octavo.scales.scale_state(model).values()])
    assert all(map(torch.equal, *found))


# ---- `update_scales` computes all histories at once: against one history at a time, in operations, and without wait


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
    model = mixed()
    found = [history for _, history in histories(model)]
    expected = [Expected(history) for history in found]
    for _ in range(STEPS):
        amax = torch.rand(len(found)) * (torch.rand(len(found)) > 0.3) * 8  # a third is not used in this step
        for history, alone, value in zip(found, expected, amax, strict=True):
            history.pending.fill_(value)
            alone.update(float(value))
        octavo.scales.update_scales(model)
        for history, alone in zip(found, expected, strict=True):
            assert torch.equal(history.recent[: len(alone.recent)], alone.recent)
            assert (history.recent[len(alone.recent) :] == 0).all()
            assert (int(history.steps), history.ready) == (alone.steps, alone.steps > 0)
            bound = 1e-6 if alone.rule.rule == "ema" else 0.0  # its sum runs in another order
            torch.testing.assert_close(history.scale.view(()), alone.scale, rtol=bound, atol=0.0)
            assert float(history.pending) == 0


def test_the_number_of_operations_does_not_grow_with_the_layers() -> None:
    counts = {}
    for layers in (1, 7):
        model = converted_model(nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(layers))), "delayed")
        model(torch.randn(16, 16)).sum().backward()
        counts[layers] = operations(lambda model=model: octavo.scales.update_scales(model)).total()
    assert counts[1] == counts[7] < 100


@pytest.mark.parametrize("rule", RULES)
def test_the_host_reads_no_number_once_all_histories_have_a_scale(rule: str) -> None:
    """On the meta device a number cannot be read."""
    cast = replace(octavo.recipe.PRESETS["delayed"]().x, history=History(8, rule))
    model = nn.ModuleList(ScaleHistory(cast, cast.history, torch.device("meta")) for _ in range(3))
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        octavo.scales.update_scales(model)
    for _, history in histories(model):
        history.ready = True
    for device in ("meta", "cpu"):  # cpu: AdamW runs on the host, and knows there
        octavo.scales.update_scales(model, skipped=torch.ones((), dtype=torch.bool, device=device))


@pytest.mark.gpu
def test_the_scales_are_those_of_the_cpu_and_the_host_does_not_wait() -> None:
    here = mixed()
    there = deepcopy(here).cuda()
    for step in range(6):
        for (_, a), (_, b) in zip(histories(here), histories(there), strict=True):
            a.pending.uniform_(1, 8)
            b.pending.copy_(a.pending)
        octavo.scales.update_scales(here)
        with no_waits() if step else nullcontext():  # the first step reads which have a scale
            octavo.scales.update_scales(there)
    for (_, a), (_, b) in zip(histories(here), histories(there), strict=True):
        assert torch.equal(a.recent, b.recent.cpu())
        assert int(a.steps) == int(b.steps) == 6
        torch.testing.assert_close(a.scale, b.scale.cpu(), rtol=1e-6, atol=0.0)


# ---- Scales from batches: learning in evaluation mode, freezing, and seeding from a calibration


def make_scale_learning(history: History | None = None) -> nn.Sequential:
    return converted_model(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)), delayed(history=history))


def rows(size: float) -> torch.Tensor:
    return torch.randn(8, 32).clamp(-0.9, 0.9) * size + size * 0.1 * torch.eye(8, 32)


def test_histories_learn_in_evaluation_where_asked():
    model = make_scale_learning().eval()
    x = rows(3.0)
    with octavo.scales.learn_scales(model):
        model(x)
    octavo.scales.update_scales(model)
    history = model[0].histories["x"]
    assert float(history.recent[0]) == float(x.abs().max())
    assert (history.steps, history.ready) == (1, True)
    model(1000 * x)
    octavo.scales.update_scales(model)
    assert history.steps == 1, "outside of the block evaluation leaves no trace"


def test_frozen_scales_are_those_of_the_batches_and_stay():
    model = make_scale_learning(History(margin=1.0))
    batches = [rows(1.0), rows(4.0), rows(2.0)]
    scales = octavo.scales.freeze_scales(model, batches)
    assert scales.keys() == {"0", "2"}
    assert float(scales["0"]) == pytest.approx(2 * max(float(batch.abs().max()) for batch in batches) / 448)
    assert scales["0"].shape == (1,)
    assert model.training, "the mode is as before"
    before = octavo.scales.scale_state(model)["0.histories.x.scale"].clone()
    model(rows(100.0)).sum().backward()
    octavo.scales.update_scales(model)
    after = octavo.scales.scale_state(model)
    assert torch.equal(after["0.histories.x.scale"], before)
    assert float(after["0.histories.w.scale"]) == pytest.approx(2 * model[0].weight.abs().max().item() / 448)


def test_a_frozen_row_gives_the_same_bits_in_every_call_and_batch():
    model = make_scale_learning()
    octavo.scales.freeze_scales(model, [rows(1.0)])
    model.eval()
    x = rows(1.0)
    alone = model(x)
    beside = model(torch.cat([x, rows(1000.0)]))[: len(x)]
    assert torch.equal(alone, model(x))
    torch.testing.assert_close(alone, beside, rtol=1e-6, atol=1e-6)
    dynamic = make_scale_learning().eval()  # without scales, each batch has its own
    assert (dynamic(x) - dynamic(torch.cat([x, rows(1000.0)]))[: len(x)]).abs().max() > 1e-3


def test_what_saturates_is_counted():
    model = make_scale_learning(History(margin=0.0))
    x = rows(1.0)
    octavo.scales.freeze_scales(model, [x])
    assert octavo.scales.saturation(model, [x, x[:2]]) == {"0": 0, "2": 0}
    wide = 3 * x
    expected = int((wide.abs() > x.abs().max()).sum()) / (2 * wide.numel())
    assert octavo.scales.saturation(model, [x, wide])["0"] == pytest.approx(expected)
    assert model.training


def test_batches_are_tuples_or_mappings_and_attention_has_three_inputs():
    model = converted_model(nn.MultiheadAttention(32, 4, kdim=16, vdim=8), "delayed")
    query, key, value = (amax * torch.ones(5, 2, n) for amax, n in ((1.0, 32), (4.0, 16), (2.0, 8)))
    batch = {"query": query, "key": key, "value": value}
    for batches in ([(query, key, value)], [batch]):
        assert float(octavo.scales.freeze_scales(model, batches)[""]) == pytest.approx(2 * 4 / 448)
    assert octavo.scales.saturation(model, [batch | {"key": 3 * key}])[""] == 16 / (32 + 16 + 8)
    assert model.histories["w"].recent[0] == model.v_proj_weight.abs().max()  # the largest of three


def test_a_calibration_begins_the_histories():
    model = make_scale_learning(History(length=3, margin=0.0))
    octavo.scales.seed_scales(model, SimpleNamespace(input_histories={"0": [9.0, 1.0, 4.0, 2.0], "2": [5.0]}))
    x, w, dy = (model[0].histories[name] for name in ("x", "w", "dy"))
    assert x.recent.tolist() == [2.0, 4.0, 1.0]  # the newest first; 9 is too old
    assert (x.steps, float(x.scale) * 448) == (3, pytest.approx(4.0))
    assert float(w.recent[0]) == float(model[0].weight.detach().abs().max())
    assert (dy.ready, dy.steps) == (False, 0)
    assert float(model[2].histories["x"].scale) * 448 == pytest.approx(5.0)
    model(rows(3.0)).sum().backward()
    octavo.scales.update_scales(model)
    assert x.recent[1:].tolist() == [2.0, 4.0]  # training goes on from there
