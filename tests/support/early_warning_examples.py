"""Faults of the tiny runs of tests/train, and the events of rules that find them."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from octavo.train.supervision import TrainingError
from octavo.watching.storage import Event, read_watch

DOWN, UP = "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj"


def event(layer: str | None, rule: str = "saturation_spike", operand: str | None = "x") -> Event:
    return Event(10, rule, layer, operand, 0.5, 0.001, "much is wrong")


def layer_of(model: Any) -> Any:
    return model.model.layers[1].mlp.down_proj


def breaks_in_fp8(trainer: Any) -> None:
    """From step 13 on, the output of a layer overflows while it runs in FP8."""

    def overflow(module: Any, args: Any, y: Any) -> Any:
        return y * math.inf if module.recipe.quantized and trainer.state.step >= 12 else y

    layer_of(trainer.model).register_forward_hook(overflow)


def run_with(trainer: Any, faults: Sequence[Callable[[Any], None]], after: int) -> list[Event]:
    """Train, and plant the faults after so many steps; the events of the run."""
    step = trainer.step

    def faulty() -> Any:
        if trainer.state.step == after:
            for fault in faults:
                fault(trainer)
        return step()

    trainer.step = faulty
    with suppress(TrainingError):
        trainer.run()
    return list(read_watch(trainer.run_folder.path).events)
