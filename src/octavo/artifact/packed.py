"""The packed folder: a model whose linear weights are eight bits, as Hugging Face's libraries open it.

    OUT/
      config.json          the model in Hugging Face's terms, "dtype": "bfloat16", and a `quantization_config`
      model.safetensors    <module>.weight        e4m3     [N, K]   of each packed linear layer
                           <module>.weight_scale  float32  [N, 1]   w ≈ weight * weight_scale
                           everything else        bfloat16          a tied head is not stored
      tokenizer.json ...   the tokenizer's files

The layout is `float-quantized` of compressed-tensors (github.com/vllm-project/compressed-tensors): weights scaled by
output channel, activations by token when the layer runs, so that both scales stand outside the GEMM's sum. Every
linear layer is packed unless `ignore` names it: a reader takes one that is neither packed nor named for a packed one
and computes nonsense without an error, which is why folders are checked tensor by tensor here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.artifact.tensors import ArtifactError, check_match

WEIGHT_DTYPE = torch.float8_e4m3fn
SCALE_DTYPE = torch.float32
OTHER_DTYPE = torch.bfloat16
SCALE_NAME = "weight_scale"

_EIGHT_BIT_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}
_GROUP = {
    "targets": ["Linear"],
    "weights": {**_EIGHT_BIT_FLOAT, "strategy": "channel", "dynamic": False},
    "input_activations": {**_EIGHT_BIT_FLOAT, "strategy": "token", "dynamic": True},
    "output_activations": None,
}
_REQUIRED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": _GROUP},
    "kv_cache_scheme": None,
}
# What other writers add and no reader needs.
_REMARKS = ("version", "observer", "ignore")


@dataclass(frozen=True)
class PackedFolder:
    """Where things lie in a packed folder."""

    path: Path

    @property
    def config(self) -> Path:
        """The model's description, with its `quantization_config`."""
        return self.path / "config.json"

    @property
    def tensors(self) -> Path:
        """The weights."""
        return self.path / "model.safetensors"


def quantization_config(ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json; `ignore` names every linear layer that is not packed, as on disk."""
    return {**_REQUIRED, "ignore": list(ignore)}


def read_ignore(config: Mapping[str, Any], where: Path) -> list[str]:
    """The linear layers that a packed folder's config.json declares unpacked, by their names on disk.

    Raises:
        ArtifactError: no packed model, or one packed in another way; the message lists what was read and required.
    """
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        raise ArtifactError(
            f"{where} is of no packed model (it has no quantization_config): make one with octavo pack RUN OUT"
        )
    if wrong := _differences(found, _REQUIRED, "quantization_config"):
        raise ArtifactError(
            f"{where}: octavo runs e4m3 weights scaled by channel with activations by token, this is another packing: "
            + "; ".join(wrong)
        )
    ignore = found.get("ignore") or []
    if not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
        raise ArtifactError(f"{where}: quantization_config.ignore must be a list of module names, got {ignore!r}")
    return ignore


def _differences(found: Mapping[str, Any], required: Mapping[str, Any], path: str) -> list[str]:
    """Where `found` says something else than `required`; fields of no content (None, empty) say nothing."""
    wrong = []
    for key in [*required, *(key for key in found if key not in required)]:
        value, wanted = found.get(key), required.get(key)
        if isinstance(wanted, dict) and isinstance(value, dict):
            wrong += _differences(value, wanted, f"{path}.{key}")
        elif (key in required or (value and key not in _REMARKS)) and value != wanted:
            wrong.append(f"{path}.{key} is {value!r}, required {wanted!r}")
    return wrong


def check_tensors(found: Mapping[str, Tensor], required: Mapping[str, Tensor], where: Path) -> None:
    """Raise an ArtifactError unless `found` has the names, shapes and dtypes of `required`, and is finite.

    Scales must be positive as well. The message names the first tensor that is wrong.
    """
    advice = "the folder is damaged or of another model: pack it again"
    try:
        check_match(found, required, str(where))
    except ArtifactError as error:
        raise ArtifactError(f"{error}; {advice}") from None
    for name, tensor in found.items():
        if tensor.dtype != required[name].dtype:
            raise ArtifactError(
                f"{where}: {name} must be {required[name].dtype}, the file has {tensor.dtype}; {advice}"
            )
        if not _finite(tensor):
            raise ArtifactError(f"{where}: {name} holds inf or NaN; {advice}")
        if name.endswith(f".{SCALE_NAME}") and not bool((tensor > 0).all()):
            raise ArtifactError(f"{where}: {name} must be positive, its least is {tensor.min():g}; {advice}")


def _finite(tensor: Tensor) -> bool:
    if tensor.dtype == WEIGHT_DTYPE:  # no inf in this format, and one NaN of either sign
        return bool(((tensor.view(torch.uint8) & 0x7F) != 0x7F).all())
    return bool(tensor.isfinite().all())


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ArtifactError: it is not JSON, or no object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ArtifactError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
