"""Reading and writing safetensors and JSON files, with errors that name the file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn


class ArtifactError(ValueError):
    """A file or folder has the wrong content. The message names it."""


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write `tensors` to the file `path`. Raises an OSError if the disk refuses."""
    try:
        save_file({name: t.detach().contiguous() for name, t in tensors.items()}, path, metadata)
    except SafetensorError as error:  # the library wraps the operating system's errors in its own
        raise OSError(str(error)) from error


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor in the file `path`, on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ArtifactError: the file is truncated or no safetensors file.
    """
    file = open_file(path)
    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def open_file(path: Path) -> Any:
    """Open the safetensors file at `path` and read its header. Raises the errors of `load_tensors`."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ArtifactError(f"{path} is truncated or not a safetensors file ({error})") from error


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers of a model by name. A tensor with several names has the first."""
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: b for name, b in model.named_buffers() if name in persistent}
    return dict(model.named_parameters()) | buffers


def check_match(found: Mapping[str, Tensor], required: Mapping[str, Tensor], where: str) -> None:
    """Raise an ArtifactError, which begins with `where`, unless `found` has the names and shapes of `required`."""
    if missing := sorted(required.keys() - found.keys()):
        former = missing[0].startswith("model.decoder.") and any("attn.c_attn" in name for name in found)
        hint = "; these are former names of octavo's GPT-2: train it again, or use the octavo that trained it"
        raise ArtifactError(f"{where}: tensor {missing[0]} is missing ({len(missing)} in all){hint if former else ''}")
    if extra := sorted(found.keys() - required.keys()):
        raise ArtifactError(f"{where}: tensor {extra[0]} has no place in the model ({len(extra)} in all)")
    for name, tensor in required.items():
        if found[name].shape != tensor.shape:
            raise ArtifactError(
                f"{where}: {name} must have shape {list(tensor.shape)}, the file has {list(found[name].shape)}"
            )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ArtifactError: it is not JSON, or no object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    return parse_object(path.read_bytes(), str(path))


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    """The object that a JSON text holds. An ArtifactError, which begins with `where`, if it holds none."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ArtifactError(f"{where} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ArtifactError(f"{where} must hold a JSON object, got {type(content).__name__}")
    return content


def replace_file(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all: a full disk must not destroy the old one."""
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
