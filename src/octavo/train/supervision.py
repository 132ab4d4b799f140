"""Supervision of a run: faults in its losses, its gradients and its watched layers, and what the run does about each.

    say     a line on the terminal, counts in metrics.jsonl, an event of the watch             always
    stop    save a checkpoint and end; end at once where a number is not finite                on_warning = "stop"
    save    give the layer more precision, or return to an earlier checkpoint                  "promote", "rollback"

Every `CHECK_EVERY` steps, and wherever the loop reads the loss, the losses and gradient norms of the steps since then
come from the device in one transfer. All ranks then decide alike: rank 0 judges by the rules of
`octavo.watching.rules`, and tells the others. actions.json of a run lists its promotions and rollbacks.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Self

import torch
from rich.console import Console
from torch import Tensor, nn

from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.folder import BUILT_IN_MODELS, Actions, Promotion, Rollback, RunFolder, remove_folder
from octavo.comparison import Call, seen_calls, with_parameters
from octavo.nn import FusedMLP
from octavo.nn.conversion import converted_experts, find_experts
from octavo.nn.delayed import histories
from octavo.nn.experts import Experts
from octavo.nn.linear import RecipeLayer
from octavo.nn.parallel_weights import first_indices, local_part
from octavo.nn.selection import e5m2_gradients, promote
from octavo.train.config import Config
from octavo.train.loss import own_random
from octavo.train.model import eager
from octavo.train.optimizer import RecentSteps, StepNumbers, learning_rate
from octavo.train.processes import gather, print_line, rank
from octavo.train.saving import CheckpointWriter, TrainState, has_finite_weights, load_checkpoint
from octavo.train.step_metrics import Metrics, precision_of
from octavo.util import plural
from octavo.watching.collection import Watch
from octavo.watching.rules import NEW, LossRule, SampleRules, StallRule, judge_rate
from octavo.watching.storage import OPERANDS, Event

CHECK_EVERY = 10  # steps
_SHOWN = 5  # warnings of a check that are printed

# The range of e5m2 is enough for gradients that e4m3 is too narrow for. Any other fault moves a layer to BF16.
E5M2_RULES = ("underflow", "saturation_spike")  # of dy
_WORDS = {"bf16": "runs in BF16", "e5m2": "has gradients in e5m2"}
_ACTIONS = {"bf16": "promote", "e5m2": "e5m2"}  # of an event


class TrainingError(RuntimeError):
    """The loss or the gradient of the run is no longer finite, or a warning was to stop it."""


@dataclass(eq=False)
class Supervisor:
    """Judges a run as it goes, and acts as its settings say. Every rank must call each function. As a context manager
    it casts each weight once a step. `passes` computes the step after so many others."""

    config: Config
    state: TrainState
    run: RunFolder
    actions: Actions
    recent: RecentSteps
    metrics: Metrics
    console: Console
    watch: Watch | None
    checkpoints: CheckpointWriter
    passes: Callable[[int], object]

    def __post_init__(self) -> None:
        self._losses, self._stalls = LossRule(), StallRule(self.state.step)
        self._samples = None if self.watch is None else SampleRules(self.watch.layers)
        matrices = [p.detach() for group in self.state.optimizer.param_groups for p in group["params"] if p.ndim > 1]
        sums: list[Any] = [p.float().square().sum() for p in matrices]
        squares = sum(float(each.full_tensor() if hasattr(each, "device_mesh") else each) for each in sums)
        self._root_mean_square = math.sqrt(squares / max(sum(p.numel() for p in matrices), 1))
        self._fp16 = self.config.precision == "fp16"
        self._counts = Counter[str]()
        self._cause: Event | None = None
        self._casts = ExitStack()

    def __enter__(self) -> Self:
        self._cast_anew()
        return self

    def __exit__(self, *error: object) -> None:
        self._casts.close()

    def _cast_anew(self) -> None:
        self._casts.close()
        self._casts.enter_context(self.state.cast_once())

    def check(self) -> bool:
        """Judge the steps and samples since the last check. True if the run went back to an earlier step."""
        steps = self.recent.read()
        for numbers in steps:
            # The loss scaler of FP16 skips a step whose gradient is not finite as it looks for the largest scale.
            if not (numbers.finite or (self._fp16 and math.isfinite(numbers.loss))):
                self._repeat(numbers)
                return True
        spikes = [event for numbers in steps if (event := self._losses.check(numbers.step, numbers.loss))]
        found: list[Event] = gather([*spikes, *self._judge_progress(steps), *self._judge_samples()])[0]
        rolls_back = self.config.watch.on_spike == "rollback"
        spike = next((event for event in found if rolls_back and event.rule == "loss_spike"), None)
        if spike is not None:
            found.remove(spike)
        self._react(found)
        return spike is not None and self._roll_back(spike)

    # ---- Judging.

    def _judge_samples(self) -> list[Event]:
        if self.watch is None or self._samples is None:
            return []
        self._samples.layers = list(self.watch.layers)
        return [event for sample in self.watch.take() for event in self._samples.check(*sample)]

    def _judge_progress(self, steps: list[StepNumbers]) -> Iterator[Event]:
        """The learning rate, until it was found too high once; and the losses while it is near its peak."""
        for step, loss, _ in steps:
            rate = learning_rate(step - 1, self.config)
            if self._cause is None and (event := judge_rate(step, rate, self._root_mean_square)):
                self._cause = event
                yield event
            # A model that was trained before learns less in a step than the noise of the loss.
            near = self.config.model in BUILT_IN_MODELS and 2 * rate >= self.config.learning_rate
            if near and (event := self._stalls.check(step, loss)):
                yield replace(event, message=f"{event.message}. Causes, the likeliest first: {self._causes()}")

    def _causes(self) -> str:
        """Possible causes of a loss that stopped falling, by the warnings of the run so far."""
        causes = [f"{plural(count, 'warning')} of {rule}" for rule, count in self._counts.most_common(1)]
        if self._cause:
            causes.insert(0, f"the learning rate, too high since step {self._cause.step}")
        else:
            causes.append(f"a learning rate, {self.config.learning_rate:.2g}, that is too high or too low")
        return "; ".join([*causes, "data with no more to learn"])

    # ---- Reacting.

    def _react(self, events: list[Event]) -> None:
        if not events:
            return
        self._counts.update(event.rule for event in events if event.layer is not None)
        self._say(self.state.step, events, self._promote(events), self._cause)
        if self.config.watch.on_warning == "stop":
            self.checkpoints.save(self.state)
            self.checkpoints.wait()
            raise TrainingError(
                f"step {self.state.step}: stopped by {events[0].describe()}. watch.on_warning is stop; continue with "
                f"--resume {self.run.path} --watch.on-warning log"
            )

    def _promote(self, events: Iterable[Event]) -> dict[Event, Promotion]:
        """Give more precision to the converted layers that events name, once each, if the settings say so."""
        if self.config.watch.on_warning != "promote":
            return {}
        layers, done, changed = recipe_layers(self.state.model), {}, set()
        for event in events:
            name = _name_of(self.state.model, event, layers)
            if name is None or name in changed or not layers[name].recipe.quantized:
                continue
            narrow = event.operand == "dy" and event.rule in E5M2_RULES
            to = "e5m2" if narrow and e5m2_gradients(layers[name]) is not None else "bf16"
            done[event] = Promotion(self.state.step, name, to, event.rule)
            changed.add(name)
        if done:
            for promotion in done.values():
                promote(layers[promotion.layer], promotion.to)
            torch._dynamo.config.recompile_limit += len(done)  # blocks share their code, which runs eagerly beyond it
            self._cast_anew()
            self.actions.promotions.extend(done.values())
            if rank() == 0:
                self.run.write_actions(self.actions)
        return done

    def _repeat(self, bad: StepNumbers) -> None:
        """Promote the layer with the first number that is not finite, and return to the step before it."""
        self.state.step = bad.step - 1  # the weights have not changed since
        place = find_nonfinite(self.state.model, self.state.device, lambda: self.passes(self.state.step))
        layer, tensor, expert = (None, "", None) if place is None else (place.layer, place.tensor, place.expert)
        operand = tensor if tensor in (*OPERANDS, "y") else None
        message = f"the loss is {bad.loss:g} and the gradient's norm {bad.norm:g}; {_found(place)}"
        event = Event(bad.step, "non_finite", layer, operand, None, None, message, expert=expert)
        done = {} if self._fp16 else self._promote([event])
        self._say(bad.step, [event], done, None)
        if not done:
            # the step that ends the run is logged, so that its last loss is not taken for its result
            self.metrics.write(bad.step, loss=bad.loss, gradient_norm=bad.norm)
            raise TrainingError(self._hopeless(bad, place))

    def _hopeless(self, bad: StepNumbers, place: "Place | None") -> str:
        self.checkpoints.wait()
        suspect = place is not None and place.tensor == "w"  # a saturating cast hides an infinite weight for some steps
        saved = (path for path in reversed(self.run.checkpoints()) if not suspect or has_finite_weights(path))
        good = next(saved, None)
        advice = "Lower learning_rate or clip, or keep sensitive layers in BF16 with skip"
        if self.config.watch.on_warning != "promote":
            advice += ", or set watch.on_warning to promote"
        elif place is not None:
            is_converted = place.layer in recipe_layers(self.state.model)
            why = "runs in BF16 by now" if is_converted else "is not converted: it never ran in FP8"
            advice = (
                f"{place.layer} {why}, so there is nothing to promote. Lower learning_rate or clip, or look at the "
                f"data of this step; --resume {self.run.path} goes on from the last checkpoint"
            )
        return (
            f"step {bad.step}: the loss is {bad.loss} and the gradient's norm {bad.norm}; {_found(place)}. {advice}; "
            + (f"the last good checkpoint is {good}" if good else "no good checkpoint was saved")
        )

    def _roll_back(self, spike: Event) -> bool:
        """Return to the newest checkpoint from before the spike, if there is one and the limit is not reached, and go
        on with the batches after those so far. Newer checkpoints are removed."""
        self.checkpoints.wait()
        state, limit = self.state, self.config.watch.rollbacks
        steps = gather([self.run.step_of(path) for path in self.run.checkpoints()])[0]
        older, spent = [step for step in steps if step <= spike.step - NEW], len(self.actions.rollbacks) >= limit
        if spent or not older:
            why = f"watch.rollbacks is {limit}" if spent else "no checkpoint is older"
            self._react([replace(spike, message=f"{spike.message}; not rolled back: {why}")])
            return False
        rollback = Rollback(state.step, max(older), self.actions.batch(state.step))
        load_checkpoint(self.run.checkpoint(rollback.to), state)
        state.optimizer.zero_grad()
        self._cast_anew()
        self.actions.rollbacks.append(rollback)
        if rank() == 0:
            self.run.write_actions(self.actions)
            for newer in (step for step in steps if step > rollback.to):
                remove_folder(self.run.checkpoint(newer))
        self._losses.restart()
        self._stalls = StallRule(self.state.step)
        self.metrics.go_back(rollback.to)  # drops the metrics of later steps
        if self.watch is not None:
            self.watch.undo_events(rollback.to)
        self._write(replace(spike, action="rollback"))
        self._print(spike, f"; back to the checkpoint of step {rollback.to}, with the batches after these")
        self.metrics.write(rollback.to, warnings={spike.rule: 1}, rolled_back_from=rollback.step)
        return True

    # ---- Saying: on the terminal, in metrics.jsonl and, where the run is watched, as events.

    def _say(self, step: int, events: Sequence[Event], done: Mapping[Event, Promotion], cause: Event | None) -> None:
        """Report events and promotions. A `cause` explains the warnings of layers, which then have one line."""
        for event in events:
            self._write(replace(event, action=_ACTIONS[done[event].to]) if event in done else event)
        action = {event: f"; {made.layer} {_WORDS[made.to]} from now on" for event, made in done.items()}
        first = [event for event in events if cause is None or event.layer is None][:_SHOWN]
        for event in first:
            self._print(event, action.get(event, ""))
        rest = [event for event in events if event not in first]
        if rest:
            rules = ", ".join(f"{count} {rule}" for rule, count in Counter(event.rule for event in rest).items())
            why = f"; {cause.rule} of step {cause.step} explains them" if cause else ""
            said = f"warning: {len(rest)} more of step {step} ({rules}), in {self.run.path / 'watch'}{why}"
            print_line(self.console, said)
        for event in rest:
            if event in action:
                print_line(self.console, f"warning: step {event.step}{action[event]}")
        found = Counter(event.rule for event in events)
        record: dict[str, Any] = {"warnings": dict(found)}
        if done:
            record["promoted"] = {promotion.layer: promotion.to for promotion in done.values()}
            record["precision"] = precision_of(self.state.model, self.state.device)
            if self.watch is not None:
                self.watch.refresh()
        self.metrics.write(step, **record)
        self.metrics.draw(step, {f"warnings/{rule}": count for rule, count in found.items()})

    def _write(self, event: Event) -> None:
        if self.watch is not None:
            self.watch.write_event(event)

    def _print(self, event: Event, action: str) -> None:
        said = f"warning: step {event.step}: {event.describe()}{action} (docs/warnings.md#{event.rule})"
        print_line(self.console, said)


def _found(place: "Place | None") -> str:
    if place is None:
        return "every number is finite when the layers of the step run one by one"
    return f"the first number that is not finite is in {place}"


def _name_of(model: nn.Module, event: Event, layers: Mapping[str, Any]) -> str | None:
    """The converted layer that a remedy changes; None if there is none. A stack of experts' matrices gives its module,
    and a layer in adapters the name that it has within them. Where the weights of a SwiGLU's gate and up are aligned,
    it is their product that has outliers: the input of down."""
    name = event.layer or ""
    names = (name, f"{name}.base_layer", name.rpartition(".")[0])
    layer: nn.Module | None = next((layers[each] for each in names if each in layers), None)
    if event.rule == "swiglu_alignment":
        mlps = [module for module in model.modules() if isinstance(module, FusedMLP)]
        layer = next((mlp.outer for mlp in mlps if any(inner is layer for inner in mlp.inner)), layer)
    return next((name for name, each in layers.items() if each is layer), None)


def apply_promotions(model: nn.Module, promotions: Iterable[Promotion]) -> None:
    """Promote the layers of a model as a run did; an ArtifactError if one lacks."""
    layers = recipe_layers(model)
    for promotion in promotions:
        if promotion.layer not in layers:
            raise ArtifactError(
                f"actions.json of the run has promoted {promotion.layer}, which is no converted layer of this "
                "model: keep the settings recipe and skip that the run had"
            )
        promote(layers[promotion.layer], promotion.to)


def recipe_layers(model: nn.Module) -> Mapping[str, Any]:
    """The converted layers of a model by name, and its converted modules of experts."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, RecipeLayer)}
    return layers | converted_experts(model)


# ---- The first number of a step that is inf or NaN: the layer, and the tensor of the layer, that had it.
#
# The step is run again, layer by layer. Hooks look at x and y in the forward pass, dy and dx in the backward pass. A
# layer with hooks is not fused with others, and compiled blocks run in eager mode, so the layer is found also where the
# training step has no tensor of its own for it. The numbers may differ a little from those of the fused pass.


@dataclass(frozen=True, order=True)
class Place:
    """The tensor of a layer that has the first number that is not finite."""

    order: int  # of the tensors of a step, as they are computed
    layer: str
    tensor: str  # w (any of the parameters), x, y, dy, dx or dw
    expert: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.tensor} of {'' if self.expert is None else f'expert {self.expert} of '}{self.layer}"


def find_nonfinite(model: nn.Module, device: torch.device, run: Callable[[], object]) -> Place | None:
    """The first place, over all ranks, in the step that `run` computes; None if the step is finite. Every rank must
    call this. Weights, scale histories and the random state stay; the gradients are None afterwards."""
    found: list[Place] = []  # the first of this rank
    orders, experts = count(), find_experts(model)

    def look(layer: str, tensor: str, value: Any, find_expert: Callable[[Any], int] | None = None) -> None:
        order, local = next(orders), local_part(value)
        if found or not isinstance(local, Tensor) or not local.is_floating_point():
            return
        if not local.detach().isfinite().all():  # detached: checkpointed code must save the same tensors again
            found.append(Place(order, layer, tensor, find_expert(value) if find_expert else None))

    def see(call: Call, tensor: str, value: Tensor) -> None:
        of_experts = tensor == "y" and isinstance(call.module, Experts) and len(call.args) > 1
        look(call.name, tensor, value, partial(_expert_of_bad_tokens, call.args[1]) if of_experts else None)

    owners = [(name.rpartition(".")[0], parameter) for name, parameter in model.named_parameters()]
    for owner, parameter in owners:
        look(owner, "w", parameter, _first_bad_matrix if owner in experts else None)
    pending = [(history, history.pending.clone()) for _, history in histories(model)]
    with eager(), own_random(device), seen_calls(with_parameters(model), see):
        model.zero_grad()
        try:
            run()
        finally:
            for history, amax in pending:
                history.pending.copy_(amax)
    for owner, parameter in owners:
        look(owner, "dw", parameter.grad, _first_bad_matrix if owner in experts else None)
    model.zero_grad()
    return min((place for places in gather(found) for place in places), default=None)


def _first_bad_matrix(stack: Any) -> int:
    """The number of the first matrix of a stack [E, N, K] that is not finite."""
    bad = local_part(stack).detach().isfinite().flatten(1).all(1).logical_not()
    return first_indices(stack)[0] + int(bad.nonzero()[0])


def _expert_of_bad_tokens(index: Tensor, y: Tensor) -> int:
    """The expert, by `index` [T, top_k], of most tokens with a bad y [T, K]; of several, that with fewest others."""
    bad = y.detach().isfinite().all(1).logical_not()
    total = index.flatten().bincount()
    found = index[bad].flatten().bincount(minlength=len(total))
    return int((found + 0.5 * found / total.clamp(min=1)).argmax())
