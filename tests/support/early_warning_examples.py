"""Faults of the tiny runs of tests/train, and the events of rules that find them."""

import math
from contextlib import suppress

from tiny_runs import before_steps

from octavo.train.supervision import TrainingError
from octavo.watching.storage import Event, read_watch

DOWN, UP = "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj"


def event(layer: str | None, rule: str = "saturation_spike", operand: str | None = "x") -> Event:
    return Event(10, rule, layer, operand, 0.5, 0.001, "much is wrong")


def layer_of(model):
    return model.model.layers[1].mlp.down_proj


def breaks_in_fp8(trainer) -> None:
    """From step 13 on, the output of a layer overflows while it runs in FP8."""
    layer_of(trainer.model).register_forward_hook(
        lambda layer, _, y: y * math.inf if layer.recipe.quantized and trainer.state.step >= 12 else y
    )


def run_with(trainer, faults, after: int) -> list[Event]:
    """Train, and plant the faults after so many steps; the events of the run."""
    before_steps(trainer, lambda: [fault(trainer) for fault in faults if trainer.state.step == after])
    with suppress(TrainingError):
        trainer.run()
    return list(read_watch(trainer.run_folder.path).events)
