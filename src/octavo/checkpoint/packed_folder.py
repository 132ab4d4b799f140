"""The tensors of a packed folder, read without building its model."""

from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo.checkpoint import layouts
from octavo.checkpoint import scheme as schemes
from octavo.checkpoint.files import ArtifactError, ShardReader, same_spec
from octavo.checkpoint.folder import copy_description
from octavo.checkpoint.layouts import Packing
from octavo.checkpoint.scheme import INPUT_SCALE_NAME, SCALE_ENDINGS, SCALE_NAME, KvScales, Scheme
from octavo.numerics import QTensor
from octavo.numerics.formats import E4M3


class PackedTensors:
    """The tensors of a packed folder, one at a time.

    `packing` has the layout, and the scheme of each packed layer. `ignored` are the linear layers that the folder
    declares unpacked. `others` are the tensors that are neither weights of packed layers nor scales. `unused` are the
    scales that no layer reads. `kv_scales` has the scales of a cache's keys and values, float32 [1] each, by the name
    of the attention layer.

    An ArtifactError if the folder is a run, not packed, packed in a way that Octavo does not read, or damaged.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        self.folder = Path(folder)
        where = self.folder / "config.json"
        self.config = layouts.read_config(self.folder)
        self.reader = ShardReader(self.folder)
        settings: dict[str, Any] = self.config.get("quantization_config") or {}  # `read_packing` refuses none
        layout = layouts.layout_of(settings)
        stated = layouts.listed_modules(layout, settings, where)
        specs = self.reader.specs
        weights = {
            name.removesuffix(".weight"): spec.dtype in schemes.WEIGHT_DTYPES
            for name, spec in specs.items()
            if name.endswith(".weight") and len(spec.shape) == 2
        }
        plain = [name for name, packed in weights.items() if not packed]
        self.ignored: list[str] = _unpacked(stated, plain, exact=layout.exact)
        # Whole names of no tensor, which transformers may have for a layer of another name in the files.
        entries = [entry for entry in stated if not entry.startswith("re:") and "*" not in entry]
        self._other_names = [entry for entry in entries if not any(name.startswith(f"{entry}.") for name in specs)]
        scaled = [name.rpartition(".")[0] for name in specs if name.endswith((f".{SCALE_NAME}", f".{SCALE_NAME}_inv"))]
        in_eight_bits = [name for name, packed in weights.items() if packed]
        linears = list(dict.fromkeys([*scaled, *in_eight_bits, *self.ignored]))
        packing = layouts.read_packing(self.config, linears, where, plain)
        cache = [name for name in specs if any(map(schemes.is_kv_scale, packing.names_in_memory(name)))]
        self._kv_scales = packing.from_files({name: self.reader.get(name) for name in cache})
        required = schemes.kv_tensors(linears, packing.kv_cache)
        schemes.check_tensors(self._kv_scales, required, self.folder)
        self.kv_scales: KvScales = schemes.kv_pairs(self._kv_scales, required)
        self.packing = replace(packing, kv_cache=bool(self.kv_scales))
        names = {ours: name for name in specs for ours in packing.names_in_memory(name)}
        scales = (f"{layer}{ending}" for layer in packing.schemes for ending in SCALE_ENDINGS)
        self._scales = {ours: names[ours] for ours in scales if ours in names}
        if codes := [name for name in in_eight_bits if name not in packing.schemes]:
            raise ArtifactError(
                f"{self.folder}: {codes[0]}.weight is in eight bits, and config.json lists the layer as unpacked, so "
                "that no reader knows its scheme: take it from the list, or pack the model again"
            )
        packed = {*self._scales.values(), *cache, *(f"{name}.weight" for name in packing.schemes)}
        rest = [name for name in specs if name not in packed]
        self.unused = schemes.unused_scales(rest, self.reader.get, self.folder)
        self.others = [name for name in rest if name not in self.unused]
        for name, scheme in self.packing.schemes.items():
            self._check(name, scheme)

    def _check(self, name: str, scheme: Scheme) -> None:
        stored = self.reader.specs.get(f"{name}.weight")
        n, k = stored.shape if stored is not None and len(stored.shape) == 2 else (0, 0)
        if reason := scheme.unreadable(n, k):
            raise ArtifactError(f"{self.folder}: {name}.weight: {reason}")
        for leaf, tensor in scheme.tensors(n, k).items():
            ours = f"{name}.{leaf}"
            disk = self._scales.get(ours, ours)
            spec = self.reader.specs.get(disk)
            found = None if spec is None else self.packing.from_files({disk: spec})[ours]
            if found is None or not same_spec(found, tensor):
                is_there = "is missing" if found is None else f"is {found.dtype} {list(found.shape)}"
                raise ArtifactError(
                    f"{self.folder}: {disk} must be {tensor.dtype} {list(tensor.shape)}, it {is_there}: pack the model "
                    "again"
                )

    def _scale(self, name: str, leaf: str) -> Tensor:
        ours, disk = f"{name}.{leaf}", self._scales[f"{name}.{leaf}"]
        scale = self.packing.from_files({disk: self.reader.get(disk)})[ours]
        schemes.check_scale(disk, scale, self.folder)
        return scale

    def stored(self, name: str) -> tuple[Tensor, Tensor]:
        """The data and the scale of a packed layer, the scale in the form of `octavo.checkpoint.scheme`."""
        return self.other(f"{name}.weight"), self._scale(name, SCALE_NAME)

    def other(self, name: str) -> Tensor:
        """A tensor that is no scale, as it is stored. An ArtifactError if it holds inf or NaN."""
        return schemes.check_finite(name, self.reader.get(name), self.folder)

    def input_scale(self, name: str) -> Tensor:
        """The scale of the input of a packed layer whose scheme is static, float32 [1]."""
        return self._scale(name, INPUT_SCALE_NAME)

    @property
    def input_histories(self) -> dict[str, list[float]]:
        """The amax that the stored input scale of each static layer maps to 448, for `octavo.scales.seed_scales`."""
        static = [name for name, scheme in self.packing.schemes.items() if scheme.static]
        return {name: [float(self.input_scale(name)) * E4M3.max] for name in static}

    def weight(self, name: str) -> QTensor:
        return self.packing.schemes[name].packed_weight(*self.stored(name))

    def suspects(self) -> list[str]:
        """The packed layers whose scales look reciprocal, if they are more than half. Only their weights are read."""
        scales = ((name, self._scale(name, SCALE_NAME)) for name in self.packing.schemes)
        return schemes.suspected(scales, lambda name: self.weight(name).dequantize())

    def kv_tensors(self, packing: Packing) -> dict[str, Tensor]:
        """The scales of a cache by their names in the files of `packing`."""
        return packing.to_files(self._kv_scales)

    def specs_as(self, packing: Packing) -> dict[str, Tensor]:
        """The files' tensors, without their data, if the layers were packed by `packing`."""
        specs = {name: self.reader.specs[name] for name in self.others} | self.kv_tensors(packing)
        for name, scheme in packing.schemes.items():
            tensors = scheme.tensors(*self.reader.specs[f"{name}.weight"].shape)
            specs |= packing.to_files({f"{name}.{leaf}": t for leaf, t in tensors.items()})
        return specs

    def describe(self, target: Path, packing: Packing | None) -> None:
        """Write config.json for `packing` (None: for a model in BF16), and copy the other descriptions of the model."""
        config = {key: value for key, value in self.config.items() if key != "quantization_config"}
        if packing is not None:
            linears = dict.fromkeys([*packing.schemes, *self.ignored, *self._other_names])
            config["quantization_config"] = layouts.quantization_config(packing, linears, self.folder)
        layouts.write_config(target, config)
        copy_description(self.folder, target)


def _unpacked(stated: list[str], plain: list[str], *, exact: bool) -> list[str]:
    """The linear layers, of those whose weight is `plain`, that a list of modules and patterns names; and heads: a tied
    one has no weight of its own, and some writers rely on readers to leave heads unpacked."""
    names = dict.fromkeys(name for name in plain if name.rpartition(".")[2] in schemes.HEADS)
    for entry in stated:
        head = entry.rstrip("*.")
        names |= dict.fromkeys([head] if head.endswith("lm_head") else [])
        names |= dict.fromkeys(name for name in plain if layouts.is_named(entry, name, exact=exact))
    return list(names)
