"""The stored scales of inputs, for the scheme static: of a calibration, or of a run's own history.

A run that was trained with the recipe `delayed` has in its checkpoint, beside the weights, the scale that the next
forward pass multiplies by, for each operand of each layer. Packed with these its forward pass is that of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from octavo.artifact.tensors import ArtifactError, load_tensors
from octavo.serve.calibration import Calibration, hash_model
from octavo.serve.source import Source

HISTORY = "history"  # what octavo.json calls the rule of scales that training kept


@dataclass(frozen=True)
class InputScales:
    """The scales of the inputs of layers, float32 [1]; those of their weights, float32 [1, 1], where a run kept them;
    and what octavo.json says of where they come from."""

    scales: Mapping[str, Tensor]
    record: Mapping[str, object]
    weights: Mapping[str, Tensor] = field(default_factory=dict)


def calibrated_scales(folder: Path | None, rule: str, source: Source, layers: Sequence[str]) -> InputScales:
    """Of the calibration in `folder`, for `layers`.

    Raises:
        ValueError: there is none, or it is of another model, or of a run, which cannot be calibrated.
    """
    if folder is None:
        raise ValueError("the scheme static stores the scales of inputs: give --calibration, made by octavo calibrate")
    found = Calibration.load(folder)
    if source.recipe or found.model_hash != hash_model(source.origin):
        raise ValueError(f"{folder} is a calibration of another model than {source.origin}: calibrate this one")
    if missing := [name for name in layers if name not in found.layers]:
        raise ValueError(f"{folder} knows nothing of {missing[0]}: calibrate the model with this version")
    scales = {name: found.scale(name, rule).reshape(1) for name in layers}
    record = {
        "rule": rule, "prompts": found.prompts, "tokens": found.tokens, "settings": dict(found.settings),
        "model_hash": found.model_hash,
    }  # fmt: skip
    return InputScales(scales, record)


def trained_scales(source: Source, layers: Sequence[str]) -> InputScales:
    """Of the checkpoint of a run trained with `delayed`: for those of `layers` that were trained so.

    Raises:
        FileNotFoundError, ArtifactError: the checkpoint has no scales, or damaged ones, for any layer or for one that
            no step has used.
    """
    path = source.origin / "state.safetensors"
    state = load_tensors(path)
    inputs, weights = {}, {}
    for name in layers:
        found = {operand: _scale(state, f"{name}.histories.{operand}", path) for operand in ("x", "w")}
        if (x := found["x"]) is not None and (w := found["w"]) is not None:
            inputs[name], weights[name] = x.reshape(1), w.reshape(1, 1)
    if not inputs:
        raise ArtifactError(f"{path} has no scales of {layers[0]}: it is not of a run that was trained with delayed")
    return InputScales(inputs, {"rule": HISTORY}, weights)


def _scale(state: Mapping[str, Tensor], history: str, path: Path) -> Tensor | None:
    """The scale that a history stands at; None for a layer that training left in BF16."""
    scale, steps = state.get(f"{history}.scale"), state.get(f"{history}.steps")
    if scale is None or steps is None:
        return None
    if int(steps) == 0:
        raise ArtifactError(
            f"{path}: {history} has no entry yet, the layer was in no step of training: pack a later step, pack by "
            "--scheme channel, or leave the layer in BF16 (--skip)"
        )
    if scale.numel() != 1 or not bool(scale.isfinite().all() and (scale > 0).all()):
        raise ArtifactError(f"{path}: {history}.scale must be one positive number, got {scale.flatten()[:4].tolist()}")
    return scale.float()
