"""Checkpoints: the state from which a run continues bit for bit, as safetensors and JSON files.

A checkpoint folder is written completely or not at all. The data needs no state: batch i depends only on i and the
seed (`octavo.train.data`).
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octavo.artifact.atomic_folder import whole_folder
from octavo.artifact.files import ArtifactError, check_match, load_tensors, model_tensors, save_tensors
from octavo.artifact.run import RunFolder
from octavo.nn import load_scale_state, scale_state
from octavo.train.optimizer import load_optimizer_state, optimizer_state, required_state


@dataclass
class TrainState:
    """The state that training changes and a checkpoint saves. `step` counts the optimizer steps that are done."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    device: torch.device
    fingerprint: str
    step: int = 0
    skipped_steps: int = 0


def save_checkpoint(run: RunFolder, state: TrainState, keep: int) -> Path:
    """Write the checkpoint of `state.step`, then remove all but the newest `keep`.

    Raises:
        WriteError: the files could not be written; all older checkpoints are still there.
    """
    for leftover in run.path.glob(".step-*.partial"):  # of a run that was killed while it saved
        shutil.rmtree(leftover)
    target = run.checkpoint(state.step)
    with whole_folder(target) as folder:
        save_tensors(model_tensors(state.model), folder / "model.safetensors", {"format": "pt"})
        save_tensors(optimizer_state(state.model, state.optimizer), folder / "optimizer.safetensors")
        save_tensors(_random_state(state.device) | scale_state(state.model), folder / "state.safetensors")
        described = {
            "step": state.step,
            "skipped_steps": state.skipped_steps,
            "fingerprint": state.fingerprint,
            "scaler": state.scaler.state_dict(),
        }
        (folder / "train.json").write_text(json.dumps(described, indent=2) + "\n")
    for old in run.checkpoints()[:-keep]:
        shutil.rmtree(old)
    return target


def load_checkpoint(folder: Path, state: TrainState) -> None:
    """Restore `state` from a checkpoint. Everything is read and checked before anything is changed.

    Raises:
        ArtifactError: a file is truncated or of another model, or the data differs from the data of the checkpoint.
    """
    try:
        described = _read_description(folder)
        files = [folder / f"{name}.safetensors" for name in ("model", "optimizer", "state")]
        tensors, moments, saved = map(load_tensors, files)
    except (FileNotFoundError, ArtifactError) as error:
        raise ArtifactError(
            f"the checkpoint {folder} is not whole: {error}. Remove that folder to resume from the one before it"
        ) from error
    if described["fingerprint"] != state.fingerprint:
        raise ArtifactError(
            f"the data is not what {folder} was trained on (its fingerprint differs): pass the same --data"
        )
    current = model_tensors(state.model)
    scales = {name: t for name, t in saved.items() if not name.startswith("random.")}
    check_match(tensors, current, f"{files[0]} is of another model")
    check_match(moments, required_state(state.model), f"{files[1]} is of another model")
    check_match(scales, scale_state(state.model), f"{files[2]} is of another recipe")
    random = _saved_random(saved, state.device, files[2])
    with torch.no_grad():
        for name, tensor in current.items():
            tensor.copy_(tensors[name])
    load_optimizer_state(state.model, state.optimizer, moments)
    load_scale_state(state.model, scales)
    state.step, state.skipped_steps = described["step"], described["skipped_steps"]
    if described["scaler"]:  # empty if it was off: the run may go on in FP16 all the same
        state.scaler.load_state_dict(described["scaler"])
    torch.set_rng_state(random["random.cpu"])
    if "random.cuda" in random:
        torch.cuda.set_rng_state(random["random.cuda"], state.device)


def _read_description(folder: Path) -> Mapping[str, Any]:
    path = folder / "train.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        described: Mapping[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ArtifactError(f"{path} is not valid JSON ({error})") from error
    required = {"step": int, "skipped_steps": int, "fingerprint": str, "scaler": dict}
    if not isinstance(described, dict) or any(not isinstance(described.get(k), kind) for k, kind in required.items()):
        entries = ", ".join(f"{key} ({kind.__name__})" for key, kind in required.items())
        raise ArtifactError(f"{path} must be an object with {entries}")
    return described


def _random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"random.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["random.cuda"] = torch.cuda.get_rng_state(device)
    return state


def _saved_random(saved: Mapping[str, Tensor], device: torch.device, path: Path) -> dict[str, Tensor]:
    """The random states for `device`. A run that was trained on a CPU has none for a GPU; it may continue there."""
    required = _random_state(device)
    if "random.cuda" not in saved:
        required.pop("random.cuda", None)
    found = {name: saved[name] for name in required if name in saved}
    check_match(found, required, f"{path} has no random state of this machine")
    return found
