"""The actions on a run in which a rule has found a fault: more precision for a layer, or the return to a checkpoint."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from octavo.artifact.atomic_folder import remove_folder
from octavo.artifact.run import RunFolder
from octavo.nn import FusedMLP, cast_once
from octavo.nn.promotion import e5m2_gradients, promote
from octavo.telemetry.schema import Event
from octavo.train.actions import Actions, Promotion, Rollback, recipe_layers
from octavo.train.blocks import allow_compilations
from octavo.train.checkpoint import TrainState, load_checkpoint
from octavo.train.checkpoint_writer import CheckpointWriter
from octavo.train.ranks import gather, rank

_OF_SMALL_GRADIENTS = ("underflow", "saturation_spike")


class WeightCaches:
    """`octavo.cast_once` of a model, which can be begun anew. A context manager."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._block = model, ExitStack()

    def __enter__(self) -> "WeightCaches":
        self.renew()
        return self

    def __exit__(self, *error: object) -> None:
        self._block.close()

    def renew(self) -> None:
        """Cast all weights by the recipes that the layers have now."""
        self._block.close()
        self._block.enter_context(cast_once(self._model))


class Remedies:
    """Changes a run in progress, and records the change in its folder. Every rank must call each function.

    Args:
        state: of the run.
        run: its folder.
        actions: those of the run so far, to which the new ones are added.
        caches: of the model of `state`.
        checkpoints: the writer of the run.
    """

    def __init__(
        self, state: TrainState, run: RunFolder, actions: Actions, caches: WeightCaches, checkpoints: CheckpointWriter
    ) -> None:
        self._state, self._run, self.actions = state, run, actions
        self._caches, self._checkpoints = caches, checkpoints

    def promote(self, events: Iterable[Event]) -> dict[Event, Promotion]:
        """Give more precision to the layers that events name; returns the promotion of each event that had one.

        A layer that is in BF16 already stays as it is, and so does a module that is no converted layer. A layer is
        promoted once, however many events it has.
        """
        layers, done, changed = recipe_layers(self._state.model), {}, set()
        for event in events:
            name = _name_of(self._state.model, event, layers)
            if name is None or name in changed or not layers[name].recipe.quantized:
                continue
            done[event] = Promotion(self._state.step, name, _precision(event, layers[name]), event.rule)
            changed.add(name)
        if done:
            for promotion in done.values():
                promote(layers[promotion.layer], promotion.to)
            allow_compilations(len(done))
            self._caches.renew()
            self.actions.promotions.extend(done.values())
            self._write()
        return done

    def roll_back(self, before: int) -> Rollback | None:
        """Return to the newest checkpoint of a step up to `before`, and go on with the batches after those so far.

        Newer checkpoints are removed. None, and nothing changes, if there is no such checkpoint.
        """
        self.wait()
        steps = gather([step for step in map(self._run.step_of, self._run.checkpoints()) if step <= before])[0]
        if not steps:
            return None
        state, target = self._state, max(steps)
        rollback = Rollback(state.step, target, self.actions.batch(state.step))
        load_checkpoint(self._run.checkpoint(target), state)
        state.optimizer.zero_grad()
        self._caches.renew()
        self.actions.rollbacks.append(rollback)
        self._write()
        if rank() == 0:
            for newer in self._run.checkpoints():
                if self._run.step_of(newer) > target:
                    remove_folder(newer)
        return rollback

    def save(self) -> None:
        """Write a checkpoint, and wait for it."""
        self._checkpoints.save(self._state)
        self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        self._checkpoints.wait()

    def _write(self) -> None:
        if rank() == 0:
            self.actions.write(self._run)


def _name_of(model: nn.Module, event: Event, layers: Mapping[str, Any]) -> str | None:
    """The converted layer that a remedy changes; None if there is none. Of a stack of experts' matrices, its module.

    Where the weights of a SwiGLU's gate and up are aligned, it is their product that has outliers: the input of down.
    """
    name = event.layer or ""
    layer: nn.Module | None = layers.get(name, layers.get(name.rpartition(".")[0]))
    if event.rule == "swiglu_alignment":
        mlps = [module for module in model.modules() if isinstance(module, FusedMLP)]
        layer = next((mlp.outer for mlp in mlps if any(inner is layer for inner in mlp.inner)), layer)
    return next((name for name, each in layers.items() if each is layer), None)


def _precision(event: Event, layer: nn.Module) -> str:
    """The range of e5m2 is enough for gradients that e4m3 is too narrow for; all else takes BF16."""
    narrow = event.operand == "dy" and event.rule in _OF_SMALL_GRADIENTS and e5m2_gradients(layer) is not None
    return "e5m2" if narrow else "bf16"
