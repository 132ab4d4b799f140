"""The steps of the training loop, and what must not change them."""

import copy
import gc
import math
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from saved_checkpoints import differing, everything, save_checkpoint, snapshot
from tiny_runs import before_steps

from octavo import Cast, Gemm, Recipe
from octavo.checkpoint.files import model_tensors
from octavo.models.tokenizer import Batches
from octavo.recipe import PRESETS
from octavo.scales import scale_state
from octavo.train.config import Config, ConfigError
from octavo.train.loss import mean_loss
from octavo.train.model import check_memory
from octavo.train.processes import EVERY, collect_between_steps, collect_young
from octavo.train.supervision import TrainingError


def gradients(trainer):
    seen = {}

    def note(optimizer, args, kwargs):
        seen.update({name: p.grad.detach().clone() for name, p in trainer.model.named_parameters()})

    handle = trainer.state.optimizer.register_step_pre_hook(note)
    loss, norm = trainer.step()
    handle.remove()
    return seen, loss, norm


def in_double(trainer, batches):
    model = copy.deepcopy(trainer.model).double()
    inputs = torch.cat([inputs for inputs, _ in batches])
    targets = torch.cat([targets for _, targets in batches])
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, loss.detach()


@pytest.fixture
def stochastic(monkeypatch):
    """A recipe whose operands and gradients are rounded stochastically, from torch's random state."""
    cast = Cast(rounding="stochastic", scale="pow2")
    three = Recipe("stochastic", Gemm(cast, cast), Gemm(cast, cast), Gemm(cast, cast))
    monkeypatch.setitem(PRESETS, "stochastic", lambda: three)


@pytest.mark.parametrize("recipe", PRESETS)
def test_every_recipe_trains(begin, recipe):
    trainer = begin(recipe=recipe, steps=4, log_every=4)
    before = copy.deepcopy(trainer.model.state_dict())
    result = trainer.run()
    assert (result.step, result.interrupted) == (4, None)
    assert math.isfinite(result.evaluation_loss)
    after = trainer.model.state_dict()
    assert all(tensor.isfinite().all() and tensor.dtype == torch.float32 for tensor in after.values())
    assert differing(after, before) == list(before)


def test_recipes_start_from_the_same_weights_and_see_the_same_batches(begin, tmp_path):
    seen = {}
    for recipe in ("bf16", "rowwise", "delayed"):
        trainer = begin(recipe=recipe, steps=3, accumulate=2, out=str(tmp_path / recipe))
        weights, batches, at = copy.deepcopy(trainer.model.state_dict()), [], trainer.training.at
        trainer.training.at = lambda index, at=at, batches=batches: batches.append((index, at(index)[0])) or at(index)
        trainer.run()
        seen[recipe] = weights, batches
    for weights, batches in seen.values():
        assert differing(weights, seen["bf16"][0]) == []
        assert [index for index, _ in batches] == [0, 1, 2, 3, 4, 5]
        assert all(torch.equal(mine, other) for (_, mine), (_, other) in zip(batches, seen["bf16"][1], strict=True))


@pytest.mark.parametrize(("batch", "accumulate"), [(4, 1), (2, 2), (1, 4)])
def test_gradient_is_the_mean_over_all_micro_batches(begin, batch, accumulate):
    settings = {"model": "gpt2", "recipe": "bf16", "precision": "fp32", "clip": 0.0}
    trainer = begin(batch=batch, accumulate=accumulate, **settings)
    required, required_loss = in_double(trainer, [trainer.training.at(i) for i in range(accumulate)])
    found, loss, norm = gradients(trainer)
    required_norm = torch.cat([gradient.flatten() for gradient in required.values()]).norm()
    assert found.keys() == required.keys()
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        # The bias of the keys adds the same number to all logits of a query, so its gradient is zero but for rounding.
        size = required[name].norm().clamp_min(1e-3 * required_norm)
        assert (gradient.double() - required[name]).norm() < 1e-5 * size, name
    assert abs(loss - required_loss) < 1e-6
    assert abs(norm / required_norm - 1) < 1e-6


def test_each_step_has_its_learning_rate(begin, records):
    trainer = begin(recipe="bf16", steps=8, warmup=2)
    used, optimizer = [], trainer.state.optimizer
    optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["lr"]))
    trainer.run()
    half = [1e-3 + 9e-3 * (1 + math.cos(math.pi * k / 6)) / 2 for k in range(6)]
    assert used == pytest.approx([5e-3, 1e-2, *half])
    assert list(records(trainer.run_folder.path, "learning_rate").values()) == used
    assert len({group["lr"] for group in trainer.state.optimizer.param_groups}) == 1


def test_histories_move_once_a_step_by_the_largest_of_its_micro_batches(begin):
    trainer = begin(recipe="delayed", accumulate=2)
    head = trainer.model.model.layers[0].self_attn.q_proj
    largest = []
    head.register_forward_pre_hook(lambda module, args: largest.append(args[0].detach().abs().amax().item()))
    for step in (1, 2, 3):
        trainer.step()
        history = scale_state(head)
        required = [max(largest[2 * i : 2 * i + 2]) for i in range(step)][::-1]  # newest first
        assert history["histories.x.recent"][:step].tolist() == required
        assert (int(history["histories.x.steps"]), float(history["histories.x.pending"])) == (step, 0)


@pytest.mark.parametrize("recipe", ["delayed", "stochastic"])
def test_evaluation_repeats_itself_and_leaves_no_trace(begin, stochastic, recipe):
    trainer = begin(recipe=recipe)
    trainer.step()
    state = snapshot(trainer)
    first = trainer.evaluate()
    assert differing(snapshot(trainer), state) == []
    torch.rand(3)
    assert trainer.evaluate() == first
    assert all(p.grad is None for p in trainer.model.parameters())


def test_evaluation_is_the_mean_over_the_first_batches_held_out(begin):
    trainer = begin(model="gpt2", recipe="bf16", precision="fp32", evaluate_batches=3)
    _, required = in_double(trainer, [trainer.validation.at(i) for i in range(3)])
    assert abs(trainer.evaluate() - required) < 1e-6


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("sequences", "count", "taken"), [(1, 5, 1), (3, 5, 3), (6, 5, 4), (6, None, 6), (8, 2, 8)])
def test_sequences_that_fill_no_batch_are_taken_once(sequences, count, taken, ranks):
    tokens, options = np.random.default_rng(0).integers(99, size=5 * sequences + 1), {"precision": "fp32"}
    shares = [Batches(tokens, 5, 4, None, (rank, ranks)) for rank in range(ranks)]
    given = torch.device("cpu"), lambda model, inputs, targets: inputs.float().mean()
    found = [mean_loss(None, share, *given, **options, count=count) for share in shares]
    assert {number for _, number in found} == {5 * taken}
    assert sum(loss for loss, _ in found) / ranks == pytest.approx(tokens[: 5 * taken].mean(), rel=1e-6)


@pytest.mark.parametrize("recipe", ["delayed", "stochastic"])
def test_looking_does_not_change_the_run(begin, stochastic, tmp_path, recipe):
    """Logging, evaluating, sampling and saving at every step, or none of them until the last."""
    ends = []
    for every in (1, 2):
        often = {"log_every": every, "evaluate_every": every, "save_every": every, "sample": 4}
        trainer = begin(recipe=recipe, steps=2, warmup=1, out=str(tmp_path / str(every)), **often)
        trainer.run()
        ends.append(snapshot(trainer))
    assert differing(*ends) == []


FP8_ATTENTION = {"attention": {"precision": "fp8", "shortest": 32}}
RECIPES = [{"recipe": "rowwise"}, {"recipe": "delayed", "model": "gpt2"}, {"recipe": "stochastic"}, FP8_ATTENTION]


@pytest.mark.parametrize("how", RECIPES, ids=str)
def test_recomputing_activations_does_not_change_the_run(begin, stochastic, tmp_path, how):
    ends = []
    for mode in ("none", "full", "selective"):
        trainer = begin(**how, accumulate=2, activation_checkpointing={"mode": mode}, out=str(tmp_path / mode))
        losses = torch.stack([trainer.step()[0] for _ in range(2)])
        ends.append(everything(trainer.state) | {"losses": losses})
    assert differing(ends[1], ends[0]) == differing(ends[2], ends[0]) == []


@pytest.mark.slow
def test_captured_steps_are_those_of_eager(begin, tmp_path, monkeypatch):
    """The graphs of the blocks, run without generated code: in the first step, the others, and evaluation; the first
    block, which gets no output of an MLP to add, and all others."""
    graphs = []
    torch._dynamo.reset()  # other tests compile the same code, up to Dynamo's limit

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    registry = torch._dynamo.backends.registry
    monkeypatch.setitem(registry._BACKENDS, "count", None)
    count._tags = ()  # as register_backend leaves it
    monkeypatch.setitem(registry._COMPILER_FNS, "count", count)
    settings = {"recipe": "delayed", "layers": 2, "steps": 3, "evaluate_every": 3, "save_every": 3, "sample": 4}
    settings["skip"] = ["*self_attn*", "*gate_proj", "*up_proj"]  # Dynamo takes a second for each FP8 layer it traces
    ends = []
    for blocks in (False, True):
        compiled = {"blocks": True, "backend": "count"} if blocks else {}
        trainer = begin(compile=compiled, out=str(tmp_path / f"{blocks}"), **settings)
        result = trainer.run()
        ends.append(model_tensors(trainer.model) | {"evaluation": torch.tensor(result.evaluation_loss)})
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)
    assert len(graphs) == 6


# --- A run that breaks


LATE = {"log_every": 8, "evaluate_every": 8, "save_every": 6}
BREAKS = [({}, 4), ({"log_every": 8, "evaluate_every": 1}, 4), (LATE, 0), ({"precision": "fp16"}, 4)]


@pytest.mark.parametrize(("every", "last"), BREAKS, ids=["log", "evaluate", "save", "fp16"])
def test_loss_that_is_no_number_names_the_step_and_the_last_checkpoint(begin, records, every, last):
    trainer = begin(recipe="bf16", **every)
    norm = trainer.model.model.norm.weight
    before_steps(trainer, lambda: trainer.state.step == 5 and norm.data.fill_(math.inf))
    with pytest.raises(TrainingError, match="step 6: the loss is nan") as caught:
        trainer.run()
    run = trainer.run_folder
    assert run.checkpoints() == ([run.checkpoint(4)] if last else [])
    assert (str(run.checkpoint(4)) if last else "no good checkpoint was saved") in str(caught.value)
    losses = records(run.path)
    assert max(losses) == 6  # the step that broke is in the log, and nothing after it
    assert losses[6] is None  # JSON has no NaN
    assert max([0, *records(run.path, "evaluation_loss")]) < 6


def test_gradient_that_is_no_number_ends_a_bf16_run_before_it_is_saved(begin):
    trainer = begin(recipe="bf16", save_every=3, log_every=8, evaluate_every=8)
    overflow_at(trainer, 2)
    with pytest.raises(TrainingError, match=r"step 3: .* norm (inf|nan)"):
        trainer.run()
    assert trainer.run_folder.checkpoints() == []


# --- When Python collects garbage in a run, and that it frees what steps leave


class Node:
    def __init__(self):
        self.own = self


def test_cycles_are_freed_at_every_fiftieth_step_and_no_sooner():
    with collect_between_steps():
        node = weakref.ref(Node())
        for step in range(1, EVERY):
            collect_young(step)
        [Node() for _ in range(10_000)]  # enough for a collection by itself
        assert node() is not None
        collect_young(EVERY)
        assert node() is None


def test_a_run_collects_between_its_steps(begin, monkeypatch):
    collected, enabled, before = [], [], gc.isenabled()
    trainer = begin(steps=3)
    monkeypatch.setattr("octavo.train.processes.collect_young", collected.append)
    before_steps(trainer, lambda: enabled.append(gc.isenabled()))
    trainer.run()
    assert (collected, enabled, gc.isenabled()) == ([1, 2, 3], [False] * 3, before)


# --- Models that are too large for the device


ABSURD = [{"width": 100_000_000}, {"width": 4 * 10**15}, {"layers": 10**9}, {"width": 10**18}]


@pytest.mark.parametrize("absurd", [*ABSURD, *({"model": "gpt2"} | each for each in ABSURD), {"mlp_width": 10**14}])
def test_a_model_beyond_the_memory_is_refused_in_plain_words(absurd):
    check_memory(Config(), 4096, torch.device("cpu"))
    with pytest.raises(ConfigError, match="28 bytes for each.*cpu has .* GB. Lower width, mlp_width or layers"):
        check_memory(Config(**absurd), 256, torch.device("cpu"))


# ---- FP16 with dynamic loss scaling: a step that overflows changes no weight


def overflow_at(trainer, *steps):
    weight = trainer.model.model.layers[0].mlp.up_proj.weight
    weight.register_hook(lambda gradient: gradient * math.inf if trainer.state.step in steps else gradient)


def test_overflow_halves_the_scale_and_skips_the_step(begin):
    trainer = begin(precision="fp16")
    overflow_at(trainer, 0, 3)
    start, scale = everything(trainer.state), trainer.state.scaler.get_scale()
    trainer.step()
    assert differing(everything(trainer.state), start) == []
    assert (trainer.state.scaler.get_scale(), trainer.state.skipped_steps, trainer.state.step) == (scale / 2, 1, 1)
    for _ in range(2):
        trainer.step()
    before = everything(trainer.state)
    assert differing(before, start) == list(start)
    trainer.step()
    # Neither the weights nor the moments, nor the optimizer's count of steps.
    assert differing(everything(trainer.state), before) == []
    assert (trainer.state.scaler.get_scale(), trainer.state.skipped_steps, trainer.state.step) == (scale / 4, 2, 4)
    assert float(before["model.norm.weight.step"]) == 2
    trainer.step()
    assert differing(everything(trainer.state), before) == list(before)


def test_norm_and_clipping_are_of_unscaled_gradients(begin, tmp_path):
    norms = {}
    for precision in ("fp16", "fp32"):
        trainer = begin(recipe="bf16", precision=precision, clip=0.25, out=str(tmp_path / precision))
        norms[precision] = []
        for _ in range(2):
            found, _, norm = gradients(trainer)
            norms[precision].append(norm)
            clipped = torch.cat([gradient.flatten() for gradient in found.values()]).norm()
            torch.testing.assert_close(clipped, torch.tensor(0.25), rtol=1e-4, atol=0)
    torch.testing.assert_close(norms["fp16"], norms["fp32"], rtol=1e-2, atol=0)
    assert min(norms["fp32"]) > 0.5  # before clipping


def test_skipped_steps_are_logged_and_the_run_goes_on(begin, records):
    trainer = begin(precision="fp16", steps=5)
    overflow_at(trainer, 1, 2)
    trainer.run()
    run = trainer.run_folder.path
    assert list(records(run, "skipped_steps").values()) == [0, 1, 2, 2, 2]
    assert list(records(run, "loss_scale").values()) == [2.0**16, 2.0**15, 2.0**14, 2.0**14, 2.0**14]
    assert [step for step, norm in records(run, "gradient_norm").items() if norm is None] == [2, 3]
    assert all(math.isfinite(loss) for loss in records(run).values())


def test_resumed_scaler_is_the_same(begin, go_on, tmp_path):
    """Scale, count towards the next growth, skipped steps: saved right after an overflow in the very first step too."""
    trainer = begin(recipe="delayed", precision="fp16")
    overflow_at(trainer, 0, 2)
    trainer.lock.close()
    for _ in range(4):
        trainer.step()
        save_checkpoint(trainer.run_folder, trainer.state, keep=1)
        resumed = go_on(trainer.run_folder.path)
        resumed.lock.close()
        assert resumed.state.scaler.state_dict() == trainer.state.scaler.state_dict()
        assert (resumed.state.step, resumed.state.skipped_steps) == (trainer.state.step, trainer.state.skipped_steps)
        assert differing(everything(resumed.state), everything(trainer.state)) == []
    for _ in range(2):
        assert torch.equal(resumed.step()[0], trainer.step()[0])
    assert differing(everything(resumed.state), everything(trainer.state)) == []
