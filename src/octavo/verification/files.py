"""The files of a packed folder as they are, read with the safetensors library and nothing of ours that packs.

What is wrong with a file is a `Finding`, never an exception: a damaged folder is what this is for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes:
        kind: file, pickle, config, tensor, scale, weights, consumer or budget.
        where: the tensor, module, file or consumer.
        message: what was required, and what was found.
    """

    kind: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass
class Bytes:
    """The tensors of a folder, and what was wrong with its files.

    Attributes:
        config: config.json, or {} where that cannot be read.
        dtypes: of each tensor, as safetensors spells it (F8_E4M3, BF16, F32, U8, ...).
        shapes: of each tensor.
        remarks: what is unusual, and wrong for some readers alone.
        folded: something was folded into the weights, which are not MODEL's then.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    folded: bool = False
    _files: dict[str, Path] = field(default_factory=dict)

    def get(self, name: str) -> Tensor:
        """One tensor on the CPU, as it is stored."""
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def found(self, kind: str, where: str, message: str) -> None:
        """Note something that is wrong."""
        self.findings.append(Finding(kind, where, message))

    @property
    def settings(self) -> Any:
        """The quantization_config, whatever it is."""
        return self.config.get("quantization_config")

    def nbytes(self, name: str) -> int:
        """Bytes of a tensor in its file."""
        count = 1
        for size in self.shapes[name]:
            count *= size
        return count * _WIDTHS.get(self.dtypes[name], 1)


_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


def read_bytes(folder: Path) -> Bytes:
    """Open every file of `folder` that may hold a tensor; pickles are named, and not opened."""
    read = Bytes(folder)
    if not folder.is_dir():
        read.found("file", str(folder), "there is no such folder")
        return read
    read.config = _json(read, "config.json", required=True)
    if read.config:
        _find_settings(read)
    read.folded = bool(_json(read, "octavo.json", required=False).get("folded"))
    for path in sorted(p for p in folder.rglob("*") if p.suffix in PICKLES):
        read.found(
            "pickle", str(path.relative_to(folder)), "a pickle, which can run code: it was not opened; delete it"
        )
    for name, wanted in _files(read).items():
        _open(read, name, wanted)
    return read


def _find_settings(read: Bytes) -> None:
    """Put into `quantization_config` what older writers said elsewhere."""
    older = read.config.get("compression_config")
    if read.settings is None and isinstance(older, dict):
        read.config["quantization_config"] = {"quant_method": "compressed-tensors"} | older
        read.remarks.append("config.json has compression_config, the older name of quantization_config")
    found = read.settings
    if found is None:
        found = _json(read, "hf_quant_config.json", required=False)
    said = found.get("quantization") if isinstance(found, dict) else None
    if isinstance(said, dict):
        read.config["quantization_config"] = {"quant_method": "modelopt"} | said


def _json(read: Bytes, name: str, required: bool) -> dict[str, Any]:
    path = read.folder / name
    if not path.is_file():
        if required:
            read.found("file", name, "is missing")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        read.found("file", name, f"is not valid JSON ({error})")
        return {}
    if not isinstance(content, dict):
        read.found("file", name, f"must hold a JSON object, it holds {type(content).__name__}")
        return {}
    return content


def _files(read: Bytes) -> dict[str, set[str] | None]:
    """The files of tensors, each with the tensors that an index says it has; None where there is no index."""
    if (read.folder / _SINGLE).is_file():
        return {_SINGLE: None}
    if not (read.folder / _INDEX).is_file():
        read.found("file", _SINGLE, f"is missing, and so is {_INDEX}: the folder has no tensors")
        return {}
    weights = _json(read, _INDEX, required=True).get("weight_map")
    if not isinstance(weights, Mapping) or not weights or not all(isinstance(v, str) for v in weights.values()):
        read.found("file", _INDEX, "must map the name of each tensor to a file in weight_map")
        return {}
    files: dict[str, set[str] | None] = {}
    for tensor, name in weights.items():
        files.setdefault(name, set())
        files[name] = (files[name] or set()) | {tensor}
    for name in sorted(files):
        if "/" in name or "\\" in name or name in ("", ".", "..") or Path(name).is_absolute():
            read.found("file", _INDEX, f"names the file {name!r}, which is outside of the folder: it was not opened")
            del files[name]
        elif not name.endswith(".safetensors"):
            read.found("file", _INDEX, f"names the file {name!r}, which is no safetensors file: it was not opened")
            del files[name]
    return dict(sorted(files.items()))


def _open(read: Bytes, name: str, wanted: set[str] | None) -> None:
    path = read.folder / name
    if not path.is_file():
        read.found("file", name, f"is missing, which {_INDEX} names")
        return
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            slices = {tensor: file.get_slice(tensor) for tensor in names}
            described = {tensor: (part.get_dtype(), tuple(part.get_shape())) for tensor, part in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        read.found("file", name, f"is truncated or no safetensors file ({error})")
        return
    for tensor, (dtype, shape) in described.items():
        if tensor in read._files:
            read.found("tensor", tensor, f"is in two files, {read._files[tensor].name} and {name}")
        read._files[tensor], read.dtypes[tensor], read.shapes[tensor] = path, dtype, shape
    for tensor in sorted((wanted or set()) - set(names)):
        read.found("tensor", tensor, f"is missing in {name}, where {_INDEX} says that it is")
    if wanted is not None:
        for tensor in sorted(set(names) - wanted):
            read.found("tensor", tensor, f"is in {name}, and {_INDEX} does not say so: readers would not see it")
