"""A packed folder by itself: its tensors and what they mean, without the model that runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.artifact.packed import (
    INPUT_SCALE_NAME,
    SCALE_NAME,
    WEIGHT_DTYPE,
    PackedFolder,
    Packing,
    copy_description,
    quantization_config,
    read_json,
    read_packing,
)
from octavo.artifact.scheme import Scheme
from octavo.artifact.shards import ShardReader, Spec
from octavo.artifact.tensors import ArtifactError
from octavo.numerics import QTensor


class PackedTensors:
    """The tensors of a packed folder, one at a time.

    Attributes:
        config: its config.json.
        packing: the layout, and the scheme of each packed layer.
        ignored: the linear layers that it declares unpacked.

    Raises:
        FileNotFoundError: a file of it is missing.
        ArtifactError: no packed folder, one packed in a way that octavo does not know, or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = PackedFolder(folder)
        self.config = read_json(self.folder.config)
        self.reader = ShardReader(folder)
        found: Any = self.config.get("quantization_config")
        settings = found if isinstance(found, dict) else {}
        self.ignored: list[str] = list(settings.get("ignore") or settings.get("modules_to_not_convert") or [])
        suffixes = (f".{SCALE_NAME}", f".{SCALE_NAME}_inv")
        scaled = [name.rpartition(".")[0] for name in self.reader.specs if name.endswith(suffixes)]
        self.packing = read_packing(self.config, [*scaled, *self.ignored], self.folder.config)
        for name, scheme in self.packing.schemes.items():
            self._check(name, scheme)
            if scheme.static and self.reader.specs.get(f"{name}.{INPUT_SCALE_NAME}") != Spec(torch.float32, (1,)):
                raise ArtifactError(f"{folder}: {name}.{INPUT_SCALE_NAME} must be one float32 number: pack it again")

    def _check(self, name: str, scheme: Scheme) -> None:
        weight, scale = (self.reader.specs.get(key) for key in self._names(name))
        if weight is None or scale is None or weight.dtype != WEIGHT_DTYPE or len(weight.shape) != 2:
            raise ArtifactError(f"{self.folder.path}: {name}.weight must be a matrix of {WEIGHT_DTYPE}, it is {weight}")
        if reason := scheme.misfit(*weight.shape):
            raise ArtifactError(f"{self.folder.path}: {name}.weight: {reason}")
        n, k = weight.shape
        required = Spec.of(scheme.empty_scale(n, k, 1))
        if scale != required:
            raise ArtifactError(f"{self.folder.path}: the scale of {name} must be {required}, it is {scale}")

    def _names(self, name: str) -> tuple[str, str]:
        return f"{name}.weight", self.packing.scale_on_disk(f"{name}.{SCALE_NAME}")

    def stored(self, name: str) -> tuple[Tensor, Tensor]:
        """Data and scale of a packed layer, as they lie in the files."""
        data, scale = (self.reader.get(key) for key in self._names(name))
        return data, scale

    def weight(self, name: str) -> QTensor:
        """The weight of a packed layer."""
        return self.packing.schemes[name].packed_weight(*self.stored(name))

    @property
    def others(self) -> list[str]:
        """The tensors that are neither weights of packed layers nor scales."""
        packed = {key for name in self.packing.schemes for key in (*self._names(name), f"{name}.{INPUT_SCALE_NAME}")}
        return [name for name in self.reader.specs if name not in packed]

    def specs_as(self, packing: Packing) -> dict[str, Spec]:
        """What the files would hold if the packed layers were packed so."""
        specs = {name: self.reader.specs[name] for name in self.others}
        for name, scheme in packing.schemes.items():
            weight = self.reader.specs[f"{name}.weight"]
            n, k = weight.shape
            scale = Spec.of(scheme.empty_scale(n, k, 1))
            if scheme.static:
                specs[f"{name}.{INPUT_SCALE_NAME}"] = Spec(torch.float32, (1,))
            specs |= {f"{name}.weight": weight, packing.scale_on_disk(f"{name}.{SCALE_NAME}"): scale}
        return specs

    def describe(self, target: Path, packing: Packing | None) -> None:
        """Write config.json for `packing` (None: for a model in BF16), and copy what else describes it."""
        config = {key: value for key, value in self.config.items() if key != "quantization_config"}
        if packing is not None:
            linears = [*packing.schemes, *self.ignored]
            config["quantization_config"] = quantization_config(packing, linears)
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        copy_description(self.folder.path, target)
