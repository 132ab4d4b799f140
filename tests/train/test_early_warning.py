"""The actions of the early warning on a run: a planted fault, what the run does about it, and how it goes on."""

import json
import math
from contextlib import nullcontext

import pytest
import torch
from early_warning_examples import DOWN, UP, breaks_in_fp8, event, layer_of
from rich.console import Console

from octavo.nn.linear import Linear
from octavo.telemetry import Event, read_watch
from octavo.train.actions import recipe_layers
from octavo.train.early_warning import TrainingError
from octavo.train.finished import open_run

QUIET = {"log_every": 100, "evaluate_every": 100, "save_every": 100}  # the early warning looks all the same


@pytest.fixture
def plant(begin):
    """plant(fault, **settings): a run in which `fault(trainer)` is called before every step."""

    def make(fault, **settings):
        trainer = begin(**settings)
        step = trainer.step

        def faulty():
            fault(trainer)
            return step()

        trainer.step = faulty
        return trainer

    return make


@pytest.fixture
def eager():
    """Without compilation: torchao compiles its steps."""
    with torch.compiler.set_stance("force_eager"):
        yield


def actions(trainer):
    return json.loads((trainer.run_folder.path / "actions.json").read_text())


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_number_that_is_not_finite_is_found_between_logs_with_its_layer_and_step(begin, recipe):
    trainer = begin(recipe=recipe, steps=40, **QUIET)
    breaks_in_fp8(trainer)
    with pytest.raises(TrainingError, match=rf"step 13: the loss is nan .* is in y of {DOWN}\. Lower") as caught:
        trainer.run()
    assert "or set watch.on_warning to promote; no checkpoint was saved yet" in str(caught.value)
    weights = list(trainer.model.parameters())
    assert all(p.isfinite().all() for p in weights)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"recipe": "rowwise"}, {"recipe": "delayed", "optimizer": {"state": "8bit"}}])
@pytest.mark.usefixtures("eager")
def test_the_layer_is_promoted_and_its_step_repeated(begin, records, options, tmp_path):
    """No step has used the bad gradient: the run is one in which the layer is promoted before that step."""
    common = QUIET | {"log_every": 1, "steps": 20, "watch": {"on_warning": "promote"}} | options
    trainer = begin(**common, out=str(tmp_path / "broken"))
    breaks_in_fp8(trainer)
    trainer.run()
    promoted = begin(**common, out=str(tmp_path / "promoted"))
    layer_of(promoted.model).register_forward_hook(lambda *_: None)  # not fused, as the other
    step = promoted.step

    def promote_at_12():
        if promoted.state.step == 12:
            layer_of(promoted.model).recipe = layer_of(trainer.model).recipe
        return step()

    promoted.step = promote_at_12
    promoted.run()
    path = tmp_path / "broken"
    assert list(records(path)) == list(range(1, 21))
    assert records(path) == records(tmp_path / "promoted")
    [promotion] = actions(trainer)["promotions"]
    assert promotion == {"step": 12, "layer": DOWN, "to": "bf16", "rule": "non_finite"}
    assert records(path, "warnings") == {13: {"non_finite": 1}}
    assert records(path, "promoted") == {13: {DOWN: "bf16"}}


def test_a_step_that_is_not_finite_in_bf16_either_ends_the_run(begin):
    trainer = begin(steps=20, **QUIET, watch={"on_warning": "promote"})
    layer_of(trainer.model).register_forward_hook(
        lambda module, args, y: y * math.inf if trainer.state.step == 6 else y
    )
    with pytest.raises(TrainingError, match=rf"step 7: .* is in y of {DOWN}") as caught:
        trainer.run()
    assert "on_warning" not in str(caught.value)  # it is promote already
    assert [promotion["layer"] for promotion in actions(trainer)["promotions"]] == [DOWN]


@pytest.mark.parametrize("name", ["model.norm", "model.embed_tokens"])
def test_a_bad_number_in_a_module_that_is_not_converted_ends_the_run_and_says_so(begin, records, name):
    trainer = begin(steps=20, **QUIET | {"save_every": 5}, watch={"on_warning": "promote"})
    module = trainer.model.get_submodule(name)
    module.register_forward_hook(lambda module, args, y: y * math.inf if trainer.state.step == 6 else y)
    expected = (
        rf"step 7: .* is in y of {name}\. {name} is not converted: it never ran in FP8, so there is nothing to .*"
    )
    with pytest.raises(
        TrainingError, match=expected + r"--resume .*/run goes on from .* checkpoint is .*00005"
    ) as caught:
        trainer.run()
    assert "skip" not in str(caught.value)
    assert not (trainer.run_folder.path / "actions.json").exists()
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


def test_layers_with_faults_are_promoted_and_a_resumed_run_keeps_that(begin, go_on, found, records):
    trainer = begin(recipe="rowwise", steps=24, log_every=1, watch={"on_warning": "promote"}, save_every=14)
    found(10, event(DOWN), event(DOWN, "kurtosis_growth"), event(UP, "underflow", "dy"), event("lm_head"), event(None))
    trainer.run()
    assert (layer_of(trainer.model).recipe.name, layer_of(trainer.model, "mlp.up_proj").recipe.name) == (
        "bf16",
        "rowwise_e5m2",
    )
    path = trainer.run_folder.path
    assert records(path, "promoted") == {10: {DOWN: "bf16", UP: "e5m2"}}
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    before, after = (line["precision"]["recipes"] for line in lines if "precision" in line)
    assert (list(before), after["bf16"]["layers"]) == (["rowwise"], [DOWN])
    assert records(path, "warnings") == {
        10: {"saturation_spike": 3, "kurtosis_growth": 1, "underflow": 1},
    }
    for later in trainer.run_folder.checkpoints()[1:]:
        later.rename(path / "elsewhere")
    resumed = go_on(path)
    names = {name: module.recipe.name for name, module in resumed.model.named_modules() if isinstance(module, Linear)}
    assert {name: recipe for name, recipe in names.items() if recipe != "rowwise"} == {DOWN: "bf16", UP: "rowwise_e5m2"}
    before = records(path)
    resumed.run()
    assert records(path) == before
    opened = open_run(path, 14).model
    assert layer_of(opened).recipe.name == "bf16"


def test_a_checkpoint_from_before_a_promotion_is_opened_without_it(begin, found):
    trainer = begin(recipe="delayed", steps=12, save_every=4, watch={"on_warning": "promote"})
    found(10, event(DOWN))
    trainer.run()
    assert [layer_of(open_run(trainer.run_folder.path, step).model).recipe.name for step in (8, 12)] == [
        "delayed",
        "bf16",
    ]


def test_where_gate_and_up_are_aligned_the_layer_after_them_is_promoted(begin, found):
    trainer = begin(steps=10, watch={"on_warning": "promote"})
    found(10, event(UP, "swiglu_alignment", None))
    trainer.run()
    assert [promotion["layer"] for promotion in actions(trainer)["promotions"]] == [DOWN]


def test_warnings_are_logged_and_change_nothing_by_default(begin, found, records, tmp_path):
    found(4, event(DOWN))
    ends = []
    for name in ("warned", "clean"):
        trainer = begin(out=str(tmp_path / name))
        trainer.run()
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
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by Dynamo, which hides it
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


def spikes(steps):
    """After each of `steps` steps, once, the weights of the last norm become twenty times as large."""
    left = set(steps)

    def fault(trainer):
        if trainer.state.step in left:
            left.remove(trainer.state.step)
            trainer.model.model.norm.weight.data.mul_(20)

    return fault


LONG = {"log_every": 1, "evaluate_every": 100, "save_every": 10, "steps": 50, "recipe": "bf16"}


def test_a_loss_spike_goes_back_to_the_last_checkpoint_and_on_with_other_batches(plant, go_on, records):
    trainer = plant(spikes([33]), **LONG, watch={"on_spike": "rollback"})
    seen, at = [], trainer.data.training.at
    trainer.data.training.at = lambda index: seen.append(index) or at(index)
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
    for later in trainer.run_folder.checkpoints()[-1:]:
        later.rename(path / "elsewhere")
    resumed = go_on(path)
    before = records(path)
    resumed.run()
    assert records(path) == before


def test_a_run_goes_back_so_often_and_then_no_more(plant, records):
    trainer = plant(spikes([33, 44]), **LONG, watch={"interval": 0, "on_spike": "rollback", "rollbacks": 1})
    assert trainer.run().step == 50
    assert len(actions(trainer)["rollbacks"]) == 1
    assert records(trainer.run_folder.path, "warnings") == {30: {"loss_spike": 1}, 46: {"loss_spike": 1}}


def test_without_a_checkpoint_from_before_the_spike_the_run_goes_on(plant, records):
    trainer = plant(spikes([33]), **LONG | {"save_every": 100}, watch={"on_spike": "rollback"})
    assert trainer.run().step == 50
    assert records(trainer.run_folder.path, "warnings") == {35: {"loss_spike": 1}}
    [spike] = read_watch(trainer.run_folder.path).events
    assert (spike.step, spike.action) == (35, None)
    assert spike.message.endswith("not rolled back: no checkpoint is older")


def test_events_go_to_the_watch(begin, found, monkeypatch):
    trainer = begin(steps=10, watch={"on_warning": "promote"})
    seen = []

    class Watch:
        layers, take, go_back = (), list, None
        done = property(lambda self: trainer.state.step)

        def step(self):
            pass

        def read_gradients(self):
            pass

        def refresh(self):
            seen.append("refresh")

        def write_event(self, event):
            seen.append(event)

    monkeypatch.setattr("octavo.train.loop.watched", lambda *args: nullcontext(Watch()))
    found(10, event(DOWN), event("lm_head"))
    trainer.run()
    assert [(e.layer, e.action) if isinstance(e, Event) else e for e in seen] == [
        (DOWN, "promote"), ("lm_head", None), "refresh",
    ]  # fmt: skip
