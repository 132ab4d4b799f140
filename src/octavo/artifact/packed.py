"""The packed folder: a model whose linear weights are eight bits, as Hugging Face's libraries open it.

    OUT/
      config.json          the model in Hugging Face's terms, "dtype": "bfloat16", and a `quantization_config`
      model.safetensors    <module>.weight        e4m3     [N, K]   of each packed linear layer
                           <module>.weight_scale  as its scheme says (`octavo.artifact.scheme`); it multiplies
                           everything else        bfloat16          a tied head is not stored
      tokenizer.json ...   the tokenizer's files

or several files of tensors and their index. The layouts, which differ in names and in the `quantization_config`:

    compressed-tensors     any scheme, several in one model (github.com/vllm-project/compressed-tensors)
    fp8                    the scheme `block` alone; the scale is called weight_scale_inv (and multiplies, too):
                           transformers' FineGrainedFP8Config, after DeepSeek-V3

Every linear layer is packed unless the configuration names it as ignored: a reader takes one that is neither packed nor
named for a packed one and computes nonsense without an error, which is why folders are checked tensor by tensor here.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.artifact.scheme import BLOCK, SCHEMES, Scheme
from octavo.artifact.tensors import ArtifactError, check_match

WEIGHT_DTYPE = torch.float8_e4m3fn
OTHER_DTYPE = torch.bfloat16
SCALE_NAME, INPUT_SCALE_NAME = "weight_scale", "input_scale"
LAYOUTS = ("compressed-tensors", "fp8")

_COMPRESSED_TENSORS = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
}
_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
# What other writers add and no reader needs.
_REMARKS = (
    "version",
    "observer",
    "ignore",
    "format",
    "config_groups",
    "targets",
    "modules_to_not_convert",
    "fmt",
    "zp_dtype",
)


@dataclass(frozen=True)
class Packing:
    """Which layers are packed, by their names on disk, and how; and the layout."""

    layout: str
    schemes: Mapping[str, Scheme]

    def scale_on_disk(self, name: str) -> str:
        """What the layout calls the tensor `name`, where that is a scale."""
        return f"{name}_inv" if self.layout == "fp8" and name.endswith(f".{SCALE_NAME}") else name

    def scale_in_memory(self, name: str) -> str:
        """The inverse of `scale_on_disk`."""
        return name.removesuffix("_inv") if self.layout == "fp8" and name.endswith(f".{SCALE_NAME}_inv") else name


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


def quantization_config(packing: Packing, linears: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json; `linears` names every linear layer, packed or not, as on disk."""
    ignore = [name for name in linears if name not in packing.schemes]
    if packing.layout == "fp8":
        return {**_FP8, "fmt": "e4m3", "modules_to_not_convert": ignore}
    groups: dict[str, list[str]] = {}
    for name, scheme in packing.schemes.items():
        groups.setdefault(scheme.name, []).append(name)
    used = [SCHEMES[name] for name in groups]
    formats = {scheme.format for scheme in used}
    return {
        **_COMPRESSED_TENSORS,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": {
            f"group_{i}": scheme.group(["Linear"] if len(used) == 1 else groups[scheme.name])
            for i, scheme in enumerate(used)
        },
        "ignore": ignore,
    }


def read_packing(config: Mapping[str, Any], linears: Sequence[str], where: Path) -> Packing:
    """How a packed folder's config.json says that the layers `linears` (their names on disk) are packed.

    Raises:
        ArtifactError: no packed model, or one packed in another way; the message lists what was read and required.
    """
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        raise ArtifactError(
            f"{where} is of no packed model (it has no quantization_config): make one with octavo pack MODEL OUT"
        )
    fp8 = found.get("quant_method") == "fp8"
    required = _FP8 if fp8 else _COMPRESSED_TENSORS
    if wrong := _differences(found, required, "quantization_config"):
        raise ArtifactError(f"{where}: this is a packing that octavo does not run: " + "; ".join(wrong))
    formats = {scheme.format for scheme in SCHEMES.values()} | {"mixed-precision"}
    if not fp8 and found.get("format") not in formats:
        raise ArtifactError(f"{where}: format is {found.get('format')!r}, octavo runs {', '.join(sorted(formats))}")
    key = "modules_to_not_convert" if fp8 else "ignore"
    ignore = found.get(key) or []
    if not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
        raise ArtifactError(f"{where}: quantization_config.{key} must be a list of module names, got {ignore!r}")
    if unknown := [name for name in ignore if name not in linears]:
        raise ArtifactError(f"{where}: {key} has {unknown[0]!r}, which is the name of no linear layer: pack it again")
    packed = [name for name in linears if name not in ignore]
    if fp8:
        return Packing("fp8", dict.fromkeys(packed, BLOCK))
    groups = _groups(found, where)
    schemes = {name: scheme for name in packed if (scheme := _scheme_of(name, groups)) is not None}
    if left := [name for name in packed if name not in schemes]:
        raise ArtifactError(f"{where}: no group of config_groups has {left[0]}, and ignore does not: pack it again")
    return Packing("compressed-tensors", schemes)


def _groups(found: Mapping[str, Any], where: Path) -> list[tuple[list[str], Scheme]]:
    """The targets and the scheme of each of the `config_groups`."""
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()) or not groups:
        raise ArtifactError(f"{where}: quantization_config.config_groups must hold groups, got {groups!r}")
    return [(list(group.get("targets") or []), _scheme(group, name, where)) for name, group in groups.items()]


def _scheme(group: Mapping[str, Any], name: str, where: Path) -> Scheme:
    path = f"quantization_config.config_groups.{name}"
    wrong = {scheme.name: _differences(group, scheme.group([]), path) for scheme in SCHEMES.values()}
    closest = min(wrong, key=lambda scheme: len(wrong[scheme]))
    if wrong[closest]:
        raise ArtifactError(
            f"{where}: this is none of the schemes that octavo runs ({', '.join(SCHEMES)}); nearest is {closest}, but "
            + "; ".join(wrong[closest])
        )
    return SCHEMES[closest]


def _scheme_of(name: str, groups: Sequence[tuple[list[str], Scheme]]) -> Scheme | None:
    """The scheme of the first group that has the layer: by name, by a pattern (re:...) or by class."""
    for targets, scheme in groups:
        for target in targets:
            pattern = target.removeprefix("re:") if target.startswith("re:") else None
            if target in (name, "Linear") or (pattern is not None and re.match(pattern, name)):
                return scheme
    return None


def copy_description(source: Path, target: Path) -> None:
    """Copy what describes a model beside its config.json and its tensors: the tokenizer, generation settings."""
    for path in sorted(source.iterdir()):
        described = path.suffix in (".json", ".txt", ".model", ".jinja") and not path.name.endswith(".index.json")
        if path.is_file() and described and path.name not in ("config.json", "octavo.json"):
            shutil.copyfile(path, target / path.name)


def _differences(found: Mapping[str, Any], required: Mapping[str, Any], path: str) -> list[str]:
    """Where `found` says something else than `required`; fields of no content (None, empty) say nothing."""
    wrong = []
    for key in [*required, *(key for key in found if key not in required)]:
        value, wanted = found.get(key), required.get(key)
        if isinstance(wanted, dict) and isinstance(value, dict):
            wrong += _differences(value, wanted, f"{path}.{key}")
        elif key not in _REMARKS and (key in required or value) and value != wanted:
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
        is_scale = name.endswith((f".{SCALE_NAME}", f".{INPUT_SCALE_NAME}"))
        if is_scale and tensor.is_floating_point() and not bool((tensor > 0).all()):
            raise ArtifactError(f"{where}: {name} must be positive, its least is {tensor.min():g}; {advice}")
        if is_scale and tensor.dtype == torch.uint8 and bool((tensor == 255).any()):
            raise ArtifactError(f"{where}: {name} holds 255, the NaN of E8M0; {advice}")


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
