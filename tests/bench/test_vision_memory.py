"""The peak memory of vision blocks is that of one mode's model alone."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bench.gpu import vision


def test_the_models_of_earlier_modes_are_freed_before_a_mode_is_measured(monkeypatch: Any) -> None:
    modes = ("bf16", "ours", "ours, only if faster")
    models: list[weakref.ref[nn.Module]] = []
    alive: list[int] = []

    def step(model: nn.Module, shape: vision.Shape) -> Callable[[], list[Tensor]]:
        models.append(weakref.ref(model.get_submodule("blocks.0")))

        def run() -> list[Tensor]:
            alive.append(sum(found() is not None for found in models))
            return [torch.ones(2)]

        return run

    def times(steps: dict[str, Any], **options: Any) -> dict[str, list[float]]:
        return {mode: [1.0] for mode in steps}

    monkeypatch.setattr(vision, "MODES", modes)
    monkeypatch.setattr(vision, "step", step)
    monkeypatch.setattr(vision, "interleaved", times)
    gc.disable()  # or Python could free them without being asked
    try:
        vision.measure(vision.TINY["ViT-H/14"], 1)
    finally:
        gc.enable()
    assert alive == [1] * 2 * len(modes)
