"""Supervision of a run: a planted fault, what the run does about it and how it goes on; the watch that it reads."""

import json
import math
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from early_warning_examples import DOWN, UP, breaks_in_fp8, event, layer_of
from ranks import run_ranks
from rich.console import Console
from tiny_models import with_slow
from tiny_runs import TINY, after_steps, before_steps
from torch import nn

from octavo.nn.linear import Linear
from octavo.train.config import Config
from octavo.train.finished import open_run
from octavo.train.supervision import TrainingError, find_nonfinite, recipe_layers
from octavo.train.trainer import start_run
from octavo.watching import read_watch

QUIET = {"log_every": 100, "evaluate_every": 100, "save_every": 100}  # the early warning looks all the same


def actions(trainer):
    return json.loads((trainer.run_folder.path / "actions.json").read_text())


@pytest.mark.parametrize("recipe", with_slow(["rowwise", "delayed"], ("delayed",)))
def test_a_number_that_is_not_finite_is_found_between_logs_with_its_layer_and_step(begin, recipe):
    trainer = begin(recipe=recipe, steps=40, **QUIET)
    breaks_in_fp8(trainer)
    said = rf"step 13: the loss is nan .* is in y of {DOWN}\. Lower .* or set watch.on_warning to promote; no good"
    with pytest.raises(TrainingError, match=said):
        trainer.run()
    assert all(p.isfinite().all() for p in trainer.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"recipe": "delayed", "optimizer": {"state": "8bit"}}, {"optimizer": {"masters": "host"}}]
)
@pytest.mark.usefixtures("eager")
def test_the_layer_is_promoted_and_its_step_repeated(begin, records, options, tmp_path):
    """No step has used the bad gradient: the run is one in which the layer is promoted before that step."""
    common = QUIET | {"log_every": 1, "steps": 20, "watch": {"on_warning": "promote"}} | options
    trainer = begin(**common, out=str(tmp_path / "broken"))
    breaks_in_fp8(trainer)
    trainer.run()
    promoted = begin(**common, out=str(tmp_path / "promoted"))
    layer_of(promoted.model).register_forward_hook(lambda *_: None)  # not fused, as the other

    def promote_at_12():
        if promoted.state.step == 12:
            layer_of(promoted.model).recipe = layer_of(trainer.model).recipe

    before_steps(promoted, promote_at_12)
    promoted.run()
    path = tmp_path / "broken"
    assert list(records(path)) == list(range(1, 21))
    assert records(path) == records(tmp_path / "promoted")
    [promotion] = actions(trainer)["promotions"]
    assert promotion == {"step": 12, "layer": DOWN, "to": "bf16", "rule": "non_finite"}
    assert records(path, "warnings") == {13: {"non_finite": 1}}
    assert records(path, "promoted") == {13: {DOWN: "bf16"}}


@pytest.mark.parametrize(
    ("name", "why"), [(DOWN, "runs in BF16 by now"), ("model.norm", "is not converted: it never ran in FP8")]
)
def test_a_bad_number_that_no_promotion_mends_ends_the_run_and_says_why(begin, records, name, why):
    trainer = begin(steps=20, **QUIET | {"save_every": 5}, watch={"on_warning": "promote"})
    module = trainer.model.get_submodule(name)
    module.register_forward_hook(lambda module, args, y: y * math.inf if trainer.state.step == 6 else y)
    said = rf"step 7: .* is in y of {name}\. {name} {why}, so there is nothing to .*--resume .*/run goes on from"
    with pytest.raises(TrainingError, match=rf"{said} .* checkpoint is .*00005") as caught:
        trainer.run()
    assert not re.search("skip|on_warning", str(caught.value))  # on_warning is promote already
    promoted = [promotion["layer"] for promotion in actions(trainer)["promotions"]] if name == DOWN else []
    assert promoted == [DOWN] or not (trainer.run_folder.path / "actions.json").exists()
    assert records(trainer.run_folder.path)[7] is None  # the loss that ended the run


def test_every_promoted_layer_is_named(begin, found, capsys):
    trainer = begin(recipe="rowwise", steps=10, watch={"on_warning": "promote"})
    names = [name for name, _ in recipe_layers(trainer.model).items()]
    found(10, *(event(name, "amax_jump") for name in names))
    trainer.console = Console()
    trainer.run()
    said = capsys.readouterr().out
    assert f"warning: {len(names) - 5} more of step 10" in said
    assert [f"{name} runs in BF16 from now on" in said for name in names] == [True] * len(names)


def test_a_rate_that_is_too_high_explains_the_warnings_of_layers(begin, found, capsys):
    trainer = begin(recipe="rowwise", steps=10, learning_rate=0.1)
    found(10, event(DOWN, "underflow", "dy"), event(UP, "underflow", "dy"), event(DOWN, "dead_scale", "dy"))
    trainer.console = Console(width=500)
    trainer.run()
    rate, others = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert "step 1: rate_too_high: the learning rate 0.05 is " in rate
    assert "3 more of step 10 (2 underflow, 1 dead_scale), in " in others
    assert others.endswith("; rate_too_high of step 1 explains them")
    assert len(read_watch(trainer.run_folder.path).events) == 4


def test_layers_with_faults_are_promoted_and_a_resumed_run_keeps_that(begin, go_on, found, records):
    trainer = begin(recipe="rowwise", steps=24, log_every=1, watch={"on_warning": "promote"}, save_every=14)
    found(10, event(DOWN), event(DOWN, "kurtosis_growth"), event(UP, "underflow", "dy"), event("lm_head"), event(None))
    trainer.run()
    path = trainer.run_folder.path
    assert records(path, "promoted") == {10: {DOWN: "bf16", UP: "e5m2"}}
    before, after = (precision["recipes"] for precision in records(path, "precision").values())
    assert (list(before), after["bf16"]["layers"]) == (["rowwise"], [DOWN])
    assert records(path, "warnings") == {10: {"saturation_spike": 3, "kurtosis_growth": 1, "underflow": 1}}
    trainer.run_folder.newest().rename(path / "elsewhere")
    resumed = go_on(path)
    names = {name: module.recipe.name for name, module in resumed.model.named_modules() if isinstance(module, Linear)}
    assert {name: recipe for name, recipe in names.items() if recipe != "rowwise"} == {DOWN: "bf16", UP: "rowwise_e5m2"}
    before = records(path)
    resumed.run()
    assert records(path) == before
    assert layer_of(open_run(path, 14).model).recipe.name == "bf16"


def test_a_checkpoint_from_before_a_promotion_is_opened_without_it(begin, found):
    """And where gate and up are aligned, it is the layer after them that is promoted."""
    trainer = begin(recipe="delayed", steps=12, save_every=4, watch={"on_warning": "promote"})
    found(10, event(UP, "swiglu_alignment", None))
    trainer.run()
    assert [promotion["layer"] for promotion in actions(trainer)["promotions"]] == [DOWN]
    models = [open_run(trainer.run_folder.path, step).model for step in (8, 12)]
    assert [layer_of(model).recipe.name for model in models] == ["delayed", "bf16"]


def test_warnings_are_logged_and_change_nothing_by_default(begin, found, records, tmp_path):
    found(4, event(DOWN))
    ends = []
    for name in ("warned", "clean"):
        begin(out=str(tmp_path / name)).run()
        ends.append(records(tmp_path / name))
    assert ends[0] == ends[1]
    assert records(tmp_path / "warned", "warnings") == {4: {"saturation_spike": 1}}
    assert not (tmp_path / "warned" / "actions.json").exists()


def test_a_warning_may_stop_the_run_with_a_checkpoint(begin, found):
    trainer = begin(steps=40, **QUIET, watch={"on_warning": "stop"})
    found(20, event(DOWN))
    with pytest.raises(TrainingError, match=rf"step 20: stopped by saturation_spike: {DOWN}: .*--resume"):
        trainer.run()
    assert [path.name for path in trainer.run_folder.checkpoints()] == ["step-00000020"]


@pytest.mark.slow
def test_compiled_blocks_go_on_with_promoted_layers(begin, go_on, found):
    torch._dynamo.reset()
    blocks = {"blocks": True, "backend": "eager"}
    trainer = begin(compile=blocks, layers=1, steps=20, watch={"on_warning": "promote"}, **QUIET)
    found(10, event("model.layers.0.mlp.up_proj"))
    with torch._dynamo.config.patch(recompile_limit=8):
        assert trainer.run().step == 20
        assert torch._dynamo.config.recompile_limit == 9
        go_on(trainer.run_folder.path).lock.close()
        assert torch._dynamo.config.recompile_limit == 10


def plant_spikes(trainer, *steps):
    """After each of `steps` steps, once, the weights of the last norm become twenty times as large."""
    left = set(steps)

    def fault():
        if trainer.state.step in left:
            left.remove(trainer.state.step)
            trainer.model.model.norm.weight.data.mul_(20)

    before_steps(trainer, fault)


LONG = {"log_every": 1, "evaluate_every": 100, "save_every": 10, "steps": 50, "recipe": "bf16"}


def test_a_loss_spike_goes_back_to_the_last_checkpoint_and_on_with_other_batches(begin, go_on, records):
    trainer = begin(**LONG, watch={"on_spike": "rollback"})
    plant_spikes(trainer, 33)
    seen, at = [], trainer.training.at
    trainer.training.at = lambda index: seen.append(index) or at(index)
    assert trainer.run().step == 50
    path = trainer.run_folder.path
    events = read_watch(path).events
    assert [(event.rule, event.action) for event in events if not event.undone] == [("loss_spike", "rollback")]
    assert all(event.step > 30 for event in events)
    [rollback] = actions(trainer)["rollbacks"]
    assert rollback == {"step": 35, "to": 30, "batch": 35}
    assert seen == [*range(35), *range(35, 55)]
    assert list(records(path)) == list(range(1, 51))
    assert records(path, "rolled_back_from") == {30: 35}
    assert max(list(records(path).values())[31:]) < 4
    trainer.run_folder.newest().rename(path / "elsewhere")
    resumed = go_on(path)
    before = records(path)
    resumed.run()
    assert records(path) == before


def test_a_run_goes_back_so_often_and_then_no_more(begin, records):
    trainer = begin(**LONG, watch={"interval": 0, "on_spike": "rollback", "rollbacks": 1})
    plant_spikes(trainer, 33, 44)
    assert trainer.run().step == 50
    assert len(actions(trainer)["rollbacks"]) == 1
    assert records(trainer.run_folder.path, "warnings") == {30: {"loss_spike": 1}, 46: {"loss_spike": 1}}


def test_without_a_checkpoint_from_before_the_spike_the_run_goes_on(begin, records):
    trainer = begin(**LONG | {"save_every": 100}, watch={"on_spike": "rollback"})
    plant_spikes(trainer, 33)
    assert trainer.run().step == 50
    assert records(trainer.run_folder.path, "warnings") == {35: {"loss_spike": 1}}
    [spike] = read_watch(trainer.run_folder.path).events
    assert (spike.step, spike.action) == (35, None)
    assert spike.message.endswith("not rolled back: no checkpoint is older")


# ---- The early warning of a run of two processes, of which one has the fault


SETTINGS = TINY | {
    "batch": 4, "steps": 40, "evaluate_batches": 1, "evaluate_every": 40, "save_every": 20,
    "watch": {"on_warning": "promote", "on_spike": "rollback"},
}  # fmt: skip


def train(rank, folder, text):
    """The norms of the steps; at step 7 a layer of rank 1 overflows in FP8, and after step 30 the loss rises."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    trainer = start_run(Config.from_dict(SETTINGS | {"data": [text], "out": f"{folder}/run"}), Console(quiet=True))
    norms, note = [], trainer.recent.note

    def overflow(module, args, y):
        return y * math.inf if rank == 1 and module.recipe.quantized and trainer.state.step == 6 else y

    trainer.recent.note = lambda step, loss, norm: (norms.append((step, float(norm))), note(step, loss, norm))
    trainer.model.model.layers[1].mlp.down_proj.register_forward_hook(overflow)
    plant_spikes(trainer, 30)
    trainer.run()
    return norms


@pytest.mark.slow
def test_all_ranks_act_alike(tmp_path, text):
    first, second = run_ranks(2, train, tmp_path, str(text))
    assert str(first) == str(second)  # nan is nan
    assert [step for step, _ in first] == [*range(1, 8), *range(7, 33), *range(21, 41)]
    assert [step for step, norm in first if not math.isfinite(norm)] == [7]
    actions = json.loads((tmp_path / "run" / "actions.json").read_text())
    assert [(each["layer"], each["to"]) for each in actions["promotions"]] == [("model.layers.1.mlp.down_proj", "bf16")]
    assert actions["rollbacks"] == [{"step": 32, "to": 20, "batch": 32}]
    assert (tmp_path / "run" / "step-00000040").is_dir()


# ---- The layer with the first number that is not finite, in each way to compute a step


MODES = {
    "plain": {},
    "delayed": {"recipe": "delayed"},
    "checkpointing": {"activation_checkpointing": {"mode": "full"}},
    "compiled": {"compile": {"blocks": True, "backend": "eager"}},
    "gpt2": {"model": "gpt2"},
}


def found(trainer):
    return find_nonfinite(trainer.model, trainer.state.device, lambda: trainer.passes(trainer.state.step))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_layer_is_named_wherever_it_is(begin, mode):
    torch._dynamo.reset()  # other tests compile the same code, up to Dynamo's limit
    trainer = begin(**MODES[mode])
    trainer.step()
    assert found(trainer) is None
    model = trainer.model.model
    layer = getattr(model, "decoder", model).layers[1].self_attn.k_proj
    name = next(name for name, module in trainer.model.named_modules() if module is layer)
    weight = layer.weight.detach().clone()
    nn.init.constant_(layer.weight, math.nan)
    assert str(found(trainer)) == f"w of {name}"
    layer.weight.data.copy_(weight)
    plants = {
        "y": lambda: layer.register_forward_hook(lambda module, args, y: y * math.inf),
        "x": lambda: layer.register_forward_pre_hook(lambda module, args: (args[0] * math.inf,)),
        "dx": lambda: layer.register_full_backward_hook(lambda module, dx, dy: (dx[0] * math.inf,)),
        "dy": lambda: layer.register_full_backward_pre_hook(lambda module, dy: (dy[0] * math.inf,)),
        "dw": lambda: layer.weight.register_hook(lambda dw: dw * math.inf),
    }
    for tensor, plant in plants.items():
        handle = plant()
        assert str(found(trainer)) == f"{tensor} of {name}", tensor
        handle.remove()
    assert found(trainer) is None
    assert all(p.grad is None for p in trainer.model.parameters())


def test_looking_leaves_the_run_as_it_was(begin, tmp_path):
    seen = []
    for look in (False, True):
        trainer = begin(recipe="delayed", dropout=0.5, out=str(tmp_path / str(look)))
        trainer.step()
        if look:
            found(trainer)
        seen.append(torch.stack([trainer.step()[0] for _ in range(2)]))
    assert torch.equal(*seen)


@pytest.mark.parametrize("poisoned", [4, 8])
def test_a_checkpoint_with_a_weight_that_is_not_finite_is_not_the_last_good_one(begin, poisoned):
    """The update of a step makes a weight infinite, and the checkpoint of that step has it."""
    trainer = begin(steps=12)

    def poison():
        if trainer.state.step == poisoned:
            layer_of(trainer.model).weight.data[0, 0] = math.inf

    after_steps(trainer, poison)
    with pytest.raises(TrainingError, match=rf"is in w of {DOWN}") as caught:
        trainer.run()
    run = trainer.run_folder
    assert run.checkpoints()[-1] == run.checkpoint(poisoned)
    good = "no good checkpoint was saved" if poisoned == 4 else f"the last good checkpoint is {run.checkpoint(4)}"
    assert str(caught.value).endswith(good)


# ---- The watch of a run: on by default, and drawn on boards


def test_weights_and_biases_gets_the_numbers_and_the_histograms(begin, go_on, records, monkeypatch):
    wandb = mock.Mock()
    wandb.Histogram = lambda np_histogram: SimpleNamespace(counts=np_histogram[0], edges=np_histogram[1])
    made = [mock.Mock(), mock.Mock()]  # runs
    wandb.init.side_effect = made
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    trainer = begin(recipe="rowwise", steps=3, log_every=1, wandb=True, watch={"interval": 2})
    trainer.run()
    run = trainer.run_folder.path
    go_on(run, "--steps", "4").run()
    first, second = (call.kwargs for call in wandb.init.call_args_list)
    assert first["id"] == second["id"]
    assert (first["name"], Path(first["dir"]), first["config"]["recipe"]) == (run.name, run, "rowwise")
    assert made[0].define_metric.call_args_list == [mock.call("step"), mock.call("*", step_metric="step")]
    assert made[0].finish.called
    lines = [call.args[0] for call in made[0].log.call_args_list]
    logged = {name: (line["step"], value) for line in lines for name, value in line.items()}
    assert logged["loss"] == (3, records(run)[3])
    name = "watch/model.layers.0.mlp.down_proj/dy"
    watched = read_watch(run)
    of_name = np.array([watched.layers[r["layer"]].name in name for r in watched.operands])
    (record,) = watched.operands[of_name & (watched.operands["step"] == 2) & (watched.operands["operand"] == 2)]
    assert logged[f"{name}/sqnr"] == (2, record["sqnr"])
    step, histogram = logged[f"{name}/log2"]
    assert step == 2
    assert histogram.counts.sum() == pytest.approx(1, abs=0.01)
    assert 2.0 ** (histogram.edges[-1] - 1) <= record["amax"] < 2.0 ** histogram.edges[-1]
    assert histogram.counts[-1] == pytest.approx(record["binades"][0] / 65535)
