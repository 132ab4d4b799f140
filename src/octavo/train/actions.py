"""The actions of the early warning on a run, in RUN/actions.json: promoted layers, and returns to a checkpoint.

The file stands beside the checkpoints, not in them: a run that is resumed from any of them keeps its promoted layers,
and does not read the batches again that it has skipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from octavo.artifact.atomic_folder import write_error
from octavo.artifact.files import ArtifactError, read_json, replace_file
from octavo.artifact.run import RunFolder
from octavo.nn.expert_conversion import converted_experts
from octavo.nn.linear import RecipeLayer
from octavo.nn.promotion import promote


@dataclass(frozen=True)
class Promotion:
    """From `step` on, a layer runs in BF16 ("bf16"), or with gradients in e5m2 ("e5m2"), because of a rule."""

    step: int
    layer: str
    to: str
    rule: str


@dataclass(frozen=True)
class Rollback:
    """At `step` the run went back to the checkpoint of step `to`; the batches of the next steps begin at `batch`.

    Batches are counted in steps: that of a run without rollbacks is the number of steps done.
    """

    step: int
    to: int
    batch: int


@dataclass
class Actions:
    """The actions so far, oldest first."""

    promotions: list[Promotion] = field(default_factory=list)
    rollbacks: list[Rollback] = field(default_factory=list)

    @classmethod
    def read(cls, run: RunFolder) -> Actions:
        """Those of a run; none if it has no such file. An ArtifactError if it is damaged."""
        if not run.actions.is_file():
            return cls()
        found = read_json(run.actions)
        try:
            return cls([Promotion(**p) for p in found["promotions"]], [Rollback(**r) for r in found["rollbacks"]])
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"{run.actions} is damaged: {type(error).__name__} {error}") from error

    def write(self, run: RunFolder) -> None:
        """Replace the file of the run."""
        try:
            replace_file(run.actions, json.dumps(asdict(self), indent=2) + "\n")
        except OSError as error:
            raise write_error(run.path, error) from error

    def batch(self, step: int) -> int:
        """The batch, counted in steps, of the step after `step` others."""
        for rollback in reversed(self.rollbacks):
            if rollback.to <= step:
                return rollback.batch + step - rollback.to
        return step

    def apply(self, model: nn.Module, step: int | None = None) -> None:
        """Promote the layers of a converted model as the run did, up to `step`; None: all of them.

        Raises:
            ArtifactError: the model has no such layer.
        """
        layers = recipe_layers(model)
        for promotion in self.promotions:
            if step is None or promotion.step <= step:
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
