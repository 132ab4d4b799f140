"""The files of a packed folder, read with the safetensors library and with no code of Octavo that packs.

An error in a file is added to `CheckpointFiles.findings`; it raises no exception, so that damaged folders can be
described.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True)
class Finding:
    """An error in the folder, a reader that disagrees with it, or a budget that it exceeds.

    Attributes:
        kind: file, pickle, config, tensor, scale, weights, reader or budget.
        where: the tensor, module, file, reader or measure.
        message: what was required, and what was found.
    """

    kind: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass
class CheckpointFiles:
    """The tensors of a folder, and the errors in its files.

    Attributes:
        folder: the packed folder.
        config: config.json, or {} if it cannot be read.
        dtypes: of each tensor, as safetensors spells it (F8_E4M3, BF16, F32, U8, ...).
        shapes: of each tensor.
        findings: the errors found so far.
        remarks: unusual things that only some readers reject.
        folded: whether smoothing or a rotation was folded into the weights, which then differ from MODEL's.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    folded: bool = False
    _paths: dict[str, Path] = field(default_factory=dict)

    def get(self, name: str) -> Tensor:
        """Read one tensor to the CPU, in its stored dtype."""
        with safe_open(self._paths[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def add_finding(self, kind: str, where: str, message: str) -> None:
        self.findings.append(Finding(kind, where, message))

    @property
    def settings(self) -> Any:
        """The quantization_config of config.json, of whatever type it is; None if there is none."""
        return self.config.get("quantization_config")

    def nbytes(self, name: str) -> int:
        """The bytes that a tensor takes in its file."""
        return math.prod(self.shapes[name]) * _WIDTHS.get(self.dtypes[name], 1)


def read_files(folder: Path) -> CheckpointFiles:
    """Read the settings and the headers of the safetensors files of `folder`. A pickle is a finding, and not opened."""
    files = CheckpointFiles(folder)
    files.config = _read_json(files, "config.json", required=True)
    if files.config:
        _find_settings(files)
    files.folded = bool(_read_json(files, "octavo.json").get("folded"))
    for path in sorted(p for p in folder.rglob("*") if p.suffix in PICKLES):
        name = str(path.relative_to(folder))
        files.add_finding("pickle", name, "is a pickle, which can run code, and was not opened: delete it")
    for name, tensors in _tensor_files(files).items():
        _read_header(files, name, tensors)
    return files


def _find_settings(files: CheckpointFiles) -> None:
    """Put the settings of older writers, which are in other places, into `quantization_config`."""
    older = files.config.get("compression_config")
    if files.settings is None and isinstance(older, dict):
        files.config["quantization_config"] = {"quant_method": "compressed-tensors"} | older
        files.remarks.append("config.json has compression_config, the older name of quantization_config")
    settings = files.settings
    if settings is None:
        settings = _read_json(files, "hf_quant_config.json")
    modelopt = settings.get("quantization") if isinstance(settings, dict) else None
    if isinstance(modelopt, dict):
        files.config["quantization_config"] = {"quant_method": "modelopt"} | modelopt


def _read_json(files: CheckpointFiles, name: str, required: bool = False) -> dict[str, Any]:
    path = files.folder / name
    if not path.is_file():
        if required:
            files.add_finding("file", name, "is missing")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        files.add_finding("file", name, f"is not valid JSON ({error})")
        return {}
    if not isinstance(content, dict):
        files.add_finding("file", name, f"must hold a JSON object, it holds {type(content).__name__}")
        return {}
    return content


def _tensor_files(files: CheckpointFiles) -> Mapping[str, set[str] | None]:
    """The safetensors files, each with the tensors that the index lists for it; None if there is no index."""
    if (files.folder / _SINGLE).is_file():
        return {_SINGLE: None}
    if not (files.folder / _INDEX).is_file():
        files.add_finding("file", _SINGLE, f"is missing, and so is {_INDEX}: the folder has no tensors")
        return {}
    weight_map = _read_json(files, _INDEX).get("weight_map")
    if (
        not isinstance(weight_map, Mapping)
        or not weight_map
        or not all(isinstance(v, str) for v in weight_map.values())
    ):
        files.add_finding("file", _INDEX, "must map the name of each tensor to a file in weight_map")
        return {}
    listed: dict[str, set[str]] = {}
    for tensor, name in weight_map.items():
        listed.setdefault(name, set()).add(tensor)
    for name in sorted(listed):
        if "/" in name or "\\" in name or name in ("", ".", "..") or Path(name).is_absolute():
            files.add_finding("file", _INDEX, f"names the file {name!r}, which is outside of the folder: not opened")
            del listed[name]
        elif not name.endswith(".safetensors"):
            files.add_finding("file", _INDEX, f"names the file {name!r}, which is not a safetensors file: not opened")
            del listed[name]
    return dict(sorted(listed.items()))


def _read_header(files: CheckpointFiles, name: str, listed: set[str] | None) -> None:
    path = files.folder / name
    if not path.is_file():
        files.add_finding("file", name, f"is missing, and {_INDEX} names it")
        return
    try:
        with safe_open(path, framework="pt") as file:
            slices = {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118, it is no mapping
            headers = {tensor: (part.get_dtype(), tuple(part.get_shape())) for tensor, part in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        files.add_finding("file", name, f"is truncated or not a safetensors file ({error})")
        return
    for tensor, (dtype, shape) in headers.items():
        if tensor in files._paths:
            files.add_finding("tensor", tensor, f"is in two files, {files._paths[tensor].name} and {name}")
        files._paths[tensor], files.dtypes[tensor], files.shapes[tensor] = path, dtype, shape
    if listed is not None:
        for tensor in sorted(listed - headers.keys()):
            files.add_finding("tensor", tensor, f"is missing in {name}, where {_INDEX} places it")
        for tensor in sorted(headers.keys() - listed):
            files.add_finding("tensor", tensor, f"is in {name}, and {_INDEX} does not list it: readers would miss it")
