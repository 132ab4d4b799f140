"""A packed folder by itself: its tensors and what they mean, without the model that runs them."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.artifact.kv_scales import K_SCALE, V_SCALE, KvScales, is_kv_scale
from octavo.artifact.packed import (
    INPUT_SCALE_NAME,
    SCALE_NAME,
    WEIGHT_DTYPE,
    PackedFolder,
    Packing,
    copy_description,
    quantization_config,
    read_packing,
    write_config,
)
from octavo.artifact.scheme import Scheme
from octavo.artifact.shards import ShardReader, Spec
from octavo.artifact.tensors import ArtifactError
from octavo.numerics import QTensor

_KV = (K_SCALE, V_SCALE)


class PackedTensors:
    """The tensors of a packed folder, one at a time.

    Attributes:
        config: its config.json.
        packing: the layout, and the scheme of each packed layer.
        ignored: the linear layers that it declares unpacked.
        kv_scales: the scales of a cache's keys and values, float32 [1] each, by the name of the attention layer; empty
            where the folder has none.

    Raises:
        FileNotFoundError: a file of it is missing.
        ArtifactError: no packed folder, one packed in a way that octavo does not know, or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = PackedFolder(folder)
        self.config = self.folder.read_config()
        self.reader = ShardReader(folder)
        found: Any = self.config.get("quantization_config")
        settings = found if isinstance(found, dict) else {}
        keys = ("ignore", "modules_to_not_convert", "ignored_layers")
        self.ignored: list[str] = self._resolved(next((settings[key] for key in keys if settings.get(key)), []))
        suffixes = (f".{SCALE_NAME}", f".{SCALE_NAME}_inv")
        scaled = [name.rpartition(".")[0] for name in self.reader.specs if name.endswith(suffixes)]
        linears = [*scaled, *self.ignored]
        packing = read_packing(self.config, linears, self.folder.config)
        self.kv_scales = self._kv_scales(packing, linears)
        self.packing = replace(packing, kv_cache=bool(self.kv_scales))
        for name, scheme in self.packing.schemes.items():
            self._check(name, scheme)

    def _resolved(self, ignored: Any) -> list[str]:
        """The list of unpacked layers, with the names of layers for patterns (of ModelOpt's, such as lm_head*).

        A pattern that matches nothing says nothing, but for a tied head, whose weight is stored under another name.
        """
        names: dict[str, None] = {}
        for entry in ignored if isinstance(ignored, list) else []:  # `read_packing` refuses another
            name = str(entry).rstrip("*.")
            found = [name] if str(entry) == name or name.endswith("lm_head") else []
            found += [plain for plain in self._plain() if "*" in str(entry) and fnmatchcase(plain, str(entry))]
            names |= dict.fromkeys(found)
        return list(names)

    def _plain(self) -> list[str]:
        """The modules that have a matrix for a weight that is not in eight bits."""
        weights = {name: spec for name, spec in self.reader.specs.items() if name.endswith(".weight")}
        plain = [name for name, spec in weights.items() if spec.dtype != WEIGHT_DTYPE and len(spec.shape) == 2]
        return [name.removesuffix(".weight") for name in plain]

    def _kv_scales(self, packing: Packing, linears: list[str]) -> KvScales:
        """The scales of a cache, taken from the files and checked."""
        disks = [name for name in self.reader.specs if any(map(is_kv_scale, packing.scales_in_memory(name)))]
        found = packing.in_memory({name: self.reader.get(name) for name in disks})
        return packing.take_kv_scales(found, linears, self.folder.path)

    def _check(self, name: str, scheme: Scheme) -> None:
        where, weight = self.folder.path, self.reader.specs.get(f"{name}.weight")
        disk = self.packing.scale_on_disk(f"{name}.{SCALE_NAME}")
        if weight is None or disk not in self.reader.specs or weight.dtype != WEIGHT_DTYPE or len(weight.shape) != 2:
            raise ArtifactError(f"{where}: {name}.weight must be a matrix of {WEIGHT_DTYPE}, it is {weight}")
        if reason := scheme.misfit(*weight.shape):
            raise ArtifactError(f"{where}: {name}.weight: {reason}")
        n, k = weight.shape
        required = Spec.of(scheme.empty_scale(n, k, 1))
        if (found := self._spec(name, SCALE_NAME)) != required:
            raise ArtifactError(f"{where}: the scale of {name} must be {required}, it is {found}")
        if scheme.static and self._spec(name, INPUT_SCALE_NAME) != Spec(torch.float32, (1,)):
            raise ArtifactError(f"{where}: {name}.{INPUT_SCALE_NAME} must be one float32 number: pack it again")

    def _spec(self, name: str, leaf: str) -> Spec | None:
        """What a scale of a packed layer is in memory."""
        disk = self.packing.scale_on_disk(f"{name}.{leaf}")
        if (spec := self.reader.specs.get(disk)) is None:
            return None
        meta = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        return Spec.of(self.packing.in_memory({disk: meta})[f"{name}.{leaf}"])

    def _scale(self, name: str, leaf: str) -> Tensor:
        disk = self.packing.scale_on_disk(f"{name}.{leaf}")
        return self.packing.in_memory({disk: self.reader.get(disk)})[f"{name}.{leaf}"]

    def stored(self, name: str) -> tuple[Tensor, Tensor]:
        """Data and scale of a packed layer; the scale as its scheme has it (`octavo.artifact.scheme`)."""
        return self.reader.get(f"{name}.weight"), self._scale(name, SCALE_NAME)

    def input_scale(self, name: str) -> Tensor:
        """The scale of the input of a packed layer whose scheme is static, float32 [1]."""
        return self._scale(name, INPUT_SCALE_NAME)

    def weight(self, name: str) -> QTensor:
        """The weight of a packed layer."""
        return self.packing.schemes[name].packed_weight(*self.stored(name))

    @property
    def others(self) -> list[str]:
        """The tensors that are neither weights of packed layers nor scales."""
        leaves = ("weight", SCALE_NAME, INPUT_SCALE_NAME)
        packed = {self.packing.scale_on_disk(f"{name}.{leaf}") for name in self.packing.schemes for leaf in leaves}
        caches = {name for name in self.reader.specs if any(map(is_kv_scale, self.packing.scales_in_memory(name)))}
        return [name for name in self.reader.specs if name not in packed | caches]

    def kv_tensors(self, packing: Packing) -> dict[str, Tensor]:
        """The scales of a cache as the files of `packing` hold them."""
        scales = self.kv_scales.items() if packing.kv_cache else ()
        return packing.on_disk({f"{n}.{leaf}": t for n, pair in scales for leaf, t in zip(_KV, pair, strict=True)})

    def specs_as(self, packing: Packing) -> dict[str, Spec]:
        """What the files would hold if the packed layers were packed so."""
        specs = {name: self.reader.specs[name] for name in self.others}
        specs |= {name: Spec.of(t) for name, t in self.kv_tensors(packing).items()}
        for name, scheme in packing.schemes.items():
            weight = self.reader.specs[f"{name}.weight"]
            n, k = weight.shape
            scales = {f"{name}.{SCALE_NAME}": scheme.empty_scale(n, k, 1)}
            if scheme.static:
                scales[f"{name}.{INPUT_SCALE_NAME}"] = torch.empty(1)
            specs |= {disk: Spec.of(t) for disk, t in packing.on_disk(scales).items()} | {f"{name}.weight": weight}
        return specs

    def describe(self, target: Path, packing: Packing | None) -> None:
        """Write config.json for `packing` (None: for a model in BF16), and copy what else describes it."""
        config = {key: value for key, value in self.config.items() if key != "quantization_config"}
        if packing is not None:
            linears = [*packing.schemes, *self.ignored]
            config["quantization_config"] = quantization_config(packing, linears)
        write_config(target, config)
        copy_description(self.folder.path, target)
