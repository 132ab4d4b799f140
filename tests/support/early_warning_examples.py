"""Faults of the tiny runs of tests/train, and the events of rules that find them."""

import math
from typing import Any

from octavo.telemetry.schema import Event

DOWN, UP = "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj"


def event(layer: str | None, rule: str = "saturation_spike", operand: str | None = "x", step: int = 10) -> Event:
    return Event(step, rule, layer, operand, 0.5, 0.001, "much is wrong")


def layer_of(model: Any, name: str = "mlp.down_proj") -> Any:
    return model.model.layers[1].get_submodule(name)


def breaks_in_fp8(trainer: Any, first: int = 13) -> None:
    """From step `first` on, the output of a layer overflows while it runs in FP8."""

    def overflow(module: Any, args: Any, y: Any) -> Any:
        return y * math.inf if module.recipe.quantized and trainer.state.step >= first - 1 else y

    layer_of(trainer.model).register_forward_hook(overflow)
