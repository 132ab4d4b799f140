"""Checkpoints: the state from which a run continues bit for bit, as safetensors and JSON files.

The files have whole tensors, however many ranks wrote them (`octavo.train.checkpoint_writer`), and any number of ranks
loads them: each rank reads its parts. The data needs no state: batch i depends only on i and the seed
(`octavo.train.data`).
"""

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from octavo.artifact.files import ArtifactError, check_match, model_tensors, read_json
from octavo.artifact.safetensors_files import THREADS, ShardReader
from octavo.nn import load_scale_state, scale_state
from octavo.train.generators import PREFIX, check_random_state, random_state, restore_random_state
from octavo.train.optimizer import optimizer_state
from octavo.train.ranks import same_outcome


@dataclass
class TrainState:
    """The state that training changes and a checkpoint saves. `step` counts the optimizer steps that are done.

    The parameters of `model` may be sharded (DTensor: FSDP2, tensor parallel); the optimizer's state then is, too.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    device: torch.device
    fingerprint: str
    step: int = 0
    skipped_steps: int = 0


def checkpoint_tensors(state: TrainState) -> dict[str, Tensor]:
    """All tensors of a checkpoint, as FILE/NAME -> tensor. Each rank has the random states of its own."""
    files = {
        "model": model_tensors(state.model),
        "optimizer": optimizer_state(state.model, state.optimizer),
        "state": random_state(state.device) | scale_state(state.model),
    }
    return {f"{file}/{name}": tensor for file, tensors in files.items() for name, tensor in tensors.items()}


def describe_checkpoint(state: TrainState) -> str:
    """The text of train.json."""
    described = {
        "step": state.step,
        "skipped_steps": state.skipped_steps,
        "fingerprint": state.fingerprint,
        "scaler": state.scaler.state_dict(),
    }
    return json.dumps(described, indent=2) + "\n"


def check_checkpoint(folder: Path, model: nn.Module, fingerprint: str) -> None:
    """Check a checkpoint before memory is taken.

    Args:
        model: on any device, the meta device too.
        fingerprint: of the data.

    Raises:
        ArtifactError: a file is truncated, the weights are of another model, or the data differs from the data of the
            checkpoint.
    """
    if _read_description(folder)["fingerprint"] != fingerprint:
        raise ArtifactError(
            f"the data is not what {folder} was trained on (its fingerprint differs): pass the same --data"
        )
    _check_weights(folder, _open(folder, "model"), model)
    for stem in ("optimizer", "state"):
        _open(folder, stem)


def load_checkpoint(folder: Path, state: TrainState) -> None:
    """Restore `state` from a checkpoint, on every rank. Everything is checked before anything is changed.

    Raises:
        ArtifactError: a file is truncated or of another model, or the data differs from the data of the checkpoint. All
            ranks raise the same error.
    """
    with same_outcome():
        check_checkpoint(folder, state.model, state.fingerprint)
        described, model, optimizer = (
            _read_description(folder),
            _ModelFiles(folder, state.model),
            _open(folder, "optimizer"),
        )
        moments = optimizer_state(state.model, state.optimizer)
        _check_fit(optimizer, moments, f"{folder / 'optimizer.safetensors'} is of another model or optimizer.state")
        check_random_state(model.saved, str(folder / "state.safetensors"))
    model.load()
    _read_into(moments, optimizer)
    state.step, state.skipped_steps = described["step"], described["skipped_steps"]
    if described["scaler"]:  # empty if it was off: the run may go on in FP16 all the same
        state.scaler.load_state_dict(described["scaler"])
    restore_random_state(model.saved, state.device, state.step)


def load_into_other_recipe(folder: Path, state: TrainState) -> None:
    """Restore weights, moments and step of `state` from a checkpoint of a run with any recipe, on every rank.

    A scale history is restored where both recipes have it; the first step of another scales dynamically. The random
    state stays.

    Raises:
        ArtifactError: a file is truncated or of another model, or the data differs from the data of the checkpoint.
    """
    with same_outcome():
        check_checkpoint(folder, state.model, state.fingerprint)
        described, weights, optimizer = _read_description(folder), _open(folder, "model"), _open(folder, "optimizer")
        moments = optimizer_state(state.model, state.optimizer)
        _check_fit(optimizer, moments, f"{folder / 'optimizer.safetensors'} is of another model or optimizer.state")
        saved = _open(folder, "state").get_all("cpu")
    _read_into(model_tensors(state.model), weights)
    _read_into(moments, optimizer)
    histories = scale_state(state.model)
    known = {name: saved.get(name, tensor) for name, tensor in histories.items()}
    same = all(known[name].shape == tensor.shape for name, tensor in histories.items())
    load_scale_state(state.model, known if same else histories)
    state.step, state.skipped_steps = described["step"], described["skipped_steps"]


def load_model(folder: Path, model: nn.Module) -> None:
    """Restore the weights and the scale histories of a converted model from a checkpoint, without an optimizer.

    Raises:
        ArtifactError: a file is truncated or of another model. The model is unchanged then.
    """
    _ModelFiles(folder, model).load()


class _ModelFiles:
    """The weights and the scale histories of a checkpoint, which fit the model; `saved` has the random states too."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self.model, self.weights = model, _open(folder, "model")
        self.saved = _open(folder, "state").get_all("cpu")
        self.scales = {name: tensor for name, tensor in self.saved.items() if not name.startswith(PREFIX)}
        _check_weights(folder, self.weights, model)
        check_match(self.scales, scale_state(model), f"{folder / 'state.safetensors'} is of another recipe")

    def load(self) -> None:
        _read_into(model_tensors(self.model), self.weights)
        load_scale_state(self.model, self.scales)


def _read_into(tensors: Mapping[str, Tensor], reader: ShardReader) -> None:
    """Fill `tensors` in place. Of a DTensor, each rank reads the part that it holds."""

    @torch.no_grad()
    def fill(name: str) -> None:
        tensor = tensors[name]
        if isinstance(tensor, DTensor):
            [chunk] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
            tensor, offsets = tensor.to_local(), chunk.offsets
        else:
            offsets = torch.Size([0] * tensor.ndim)
        if tensor.numel():  # a parameter with fewer rows than there are ranks
            tensor.copy_(reader.get_part(name, offsets, tensor.shape))

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(fill, tensors))


def _open(folder: Path, stem: str) -> ShardReader:
    try:
        return ShardReader(folder, stem)
    except (FileNotFoundError, ArtifactError) as error:
        raise _not_whole(folder, error) from error


def _not_whole(folder: Path, error: Exception) -> ArtifactError:
    return ArtifactError(
        f"the checkpoint {folder} is not whole: {error}. Remove that folder to resume from the one before it"
    )


def _check_weights(folder: Path, weights: ShardReader, model: nn.Module) -> None:
    _check_fit(weights, model_tensors(model), f"{folder / 'model.safetensors'} is of another model")


def _check_fit(reader: ShardReader, required: Mapping[str, Tensor], where: str) -> None:
    check_match({name: spec.meta() for name, spec in reader.specs.items()}, required, where)


def _read_description(folder: Path) -> Mapping[str, Any]:
    path = folder / "train.json"
    try:
        described = read_json(path)
    except (FileNotFoundError, ArtifactError) as error:
        raise _not_whole(folder, error) from error
    required = {"step": int, "skipped_steps": int, "fingerprint": str, "scaler": dict}
    if any(not isinstance(described.get(key), kind) for key, kind in required.items()):
        entries = ", ".join(f"{key} ({kind.__name__})" for key, kind in required.items())
        raise _not_whole(folder, ArtifactError(f"{path} must be an object with {entries}"))
    return described
