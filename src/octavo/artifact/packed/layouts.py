"""The packed folder: a model with linear weights in eight bits, in a form that Hugging Face's libraries open.

    OUT/
      config.json          the model in Hugging Face's terms, "dtype": "bfloat16", and a `quantization_config`
      model.safetensors    <module>.weight        e4m3 or int8 [N, K]   of each packed linear layer
                           <module>.weight_scale  as its scheme says (`octavo.artifact.packed.scheme`); it multiplies
                           everything else        bfloat16          a tied head is not stored
      tokenizer.json ...   the tokenizer's files

or several files of tensors and their index. The layouts differ in names and in the `quantization_config`:

    compressed-tensors     any scheme, several in one model (`octavo.artifact.packed.compressed_tensors`)
    fp8                    the scheme `block` alone; the scale is called weight_scale_inv (and multiplies, too):
                           transformers' FineGrainedFP8Config, after DeepSeek-V3 (`octavo.artifact.packed.fp8`)
    modelopt               one of static, channel and block (`octavo.artifact.packed.modelopt`);
                           for vLLM and TensorRT-LLM
    autofp8                static or tensor (`octavo.artifact.packed.fp8`); for vLLM

Every linear layer is packed unless the configuration names it as ignored. A reader takes a layer that is neither packed
nor ignored for a packed one and computes nonsense without an error. So folders are checked tensor by tensor here.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.artifact.files import ArtifactError, check_match, read_json
from octavo.artifact.numbers import failing, is_finite
from octavo.artifact.packed import compressed_tensors, fp8, modelopt
from octavo.artifact.packed.kv_scales import KvScales, is_kv_scale, kv_names, take_kv_scales
from octavo.artifact.packed.scales import (
    INPUT_SCALE_NAME,
    OTHER_NAMES,
    SCALE_NAME,
    check_scale,
    is_positive,
    read_number,
    read_scale,
)
from octavo.artifact.packed.scheme import Scheme
from octavo.artifact.run import check_config, refuse_run
from octavo.numerics import TENSOR

EXPERT_DTYPE = torch.float8_e4m3fn
UNQUANTIZED_DTYPE = torch.bfloat16
LAYOUTS = ("compressed-tensors", "fp8", "modelopt", "autofp8")
# The names of output heads, which readers leave unpacked even if a folder does not name them as ignored.
HEADS = ("lm_head", "embed_out", "score", "classifier")
# The readers of the layouts that transformers does not open.
READERS = {"modelopt": "vLLM and TensorRT-LLM", "autofp8": "vLLM"}
_SCALES = (f".{SCALE_NAME}", f".{INPUT_SCALE_NAME}")
# The schemes of the layouts that do not hold all schemes. These layouts hold one scheme in a model.
_HELD = {"fp8": ("block",), "modelopt": ("static", "channel", "block"), "autofp8": ("static", "tensor")}


def check_layout(layout: str, schemes: Iterable[Scheme], kv_cache: bool) -> None:
    """Raise a ValueError, which names the alternative, unless `layout` can hold `schemes`, and with `kv_cache` the
    scales of a cache of keys and values."""
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: choose one of {', '.join(LAYOUTS)}")
    names = sorted({scheme.name for scheme in schemes})
    held = _HELD.get(layout, tuple(names))
    instead = "or --layout compressed-tensors, which holds any"
    if others := [name for name in names if name not in held]:
        what = f"the scheme {held[0]} alone" if len(held) == 1 else f"the schemes {', '.join(held)}"
        raise ValueError(f"the layout {layout} holds {what}, not {', '.join(others)}: --scheme {held[0]}, {instead}")
    if layout in _HELD and len(names) > 1:
        raise ValueError(f"the layout {layout} holds one scheme in a model, not {' and '.join(names)}: one, {instead}")
    if layout == "fp8" and kv_cache:
        raise ValueError(f"the layout fp8 has no place for the scales of a KV cache: {instead.removeprefix('or ')}")


@dataclass(frozen=True)
class Packing:
    """The packing of a folder: its layout, the scheme of each packed layer by its name in the files, and whether the
    scales of a KV cache are stored."""

    layout: str
    schemes: Mapping[str, Scheme]
    kv_cache: bool = False

    def name_in_files(self, name: str) -> str:
        """The name that the layout gives to the tensor `name`, if that is a scale; else `name`."""
        module, _, leaf = name.rpartition(".")
        if self.layout == "fp8" and leaf == SCALE_NAME:
            return f"{name}_inv"
        if self.layout == "modelopt" and is_kv_scale(name):
            return f"{module}.{leaf[0]}_proj.{leaf}"
        return name

    def names_in_memory(self, name: str) -> list[str]:
        """The names in memory of a tensor of a file: the inverse of `name_in_files`, for every name that is read."""
        module, _, leaf = name.rpartition(".")
        if leaf in OTHER_NAMES and self.layout in ("fp8", "autofp8"):
            return [f"{module}.{OTHER_NAMES[leaf]}"]
        # AutoFP8 does not declare its scales of keys and values. In other layouts outputs may have scales, too.
        of_output = leaf == "output_scale" and not self.kv_cache and self.layout != "autofp8"
        return [name] if of_output else kv_names(name)

    def to_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the files that hold `tensors`. Scales may have another name and another shape there."""
        return {self.name_in_files(name): self._shaped_for_disk(name, t) for name, t in tensors.items()}

    def from_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `to_files`, for every name, dtype and shape that is read (`octavo.artifact.packed.scales`).

        Raises:
            ArtifactError: two tensors are the same scale.
        """
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            for ours in self.names_in_memory(name):
                if ours in found:
                    raise ArtifactError(f"{name}: the file has this scale under a second name, too; keep one of them")
                found[ours] = self._read(ours, tensor)
        return found

    def take_kv_scales(self, tensors: dict[str, Tensor], linears: Iterable[str], where: Path) -> KvScales:
        """See `octavo.artifact.packed.kv_scales.take_kv_scales`. AutoFP8 need not declare such scales."""
        declared = self.kv_cache or (self.layout == "autofp8" and any(map(is_kv_scale, tensors)))
        return take_kv_scales(tensors, linears, declared, where)

    def _shaped_for_disk(self, name: str, scale: Tensor) -> Tensor:
        if self.layout not in ("modelopt", "autofp8"):
            return scale
        module, _, leaf = name.rpartition(".")
        scheme = self.schemes.get(module) if leaf in (SCALE_NAME, INPUT_SCALE_NAME) else None
        if is_kv_scale(name) or (scheme is not None and scheme.weight.granularity == TENSOR):
            return scale.reshape(())
        if scheme is None or leaf != SCALE_NAME:
            return scale
        return scale[:, None, :, None] if scheme.name == "block" else scale.flatten()

    def _read(self, name: str, tensor: Tensor) -> Tensor:
        """Convert the tensor `name` (its name in memory) from its form in a file to its form in memory."""
        if is_kv_scale(name):
            return read_number(tensor)
        module, _, leaf = name.rpartition(".")
        is_scale = leaf in (SCALE_NAME, INPUT_SCALE_NAME) and module in self.schemes
        return read_scale(tensor, leaf, self.schemes[module]) if is_scale else tensor


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a packed folder, with a `quantization_config` in the newest spelling.

    compressed-tensors named it `compression_config` once. ModelOpt has an older spelling, which may also be in
    hf_quant_config.json alone.

    Raises:
        FileNotFoundError: there is no config.json.
        ArtifactError: one of the files is not JSON, or the folder is a run.
    """
    refuse_run(folder)
    where, beside = folder / "config.json", folder / modelopt.SIDE_FILE
    check_config(folder, "a folder that octavo pack wrote")
    config = read_json(where)
    if isinstance(older := config.pop("compression_config", None), dict):
        config.setdefault("quantization_config", {"quant_method": "compressed-tensors", **older})
    found = config.get("quantization_config")
    if found is None and beside.is_file():
        found, where = read_json(beside), beside
    if isinstance(found, dict) and modelopt.is_modelopt(found):
        config["quantization_config"] = modelopt.in_newer_spelling(found, where)
    return config


def quantization_config(packing: Packing, linears: Iterable[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json. `linears` names every linear layer, packed or not, as in the files."""
    ignore = [name for name in linears if name not in packing.schemes]
    if packing.layout == "fp8":
        return fp8.describe_blocks(ignore)
    describe = {
        "compressed-tensors": compressed_tensors.describe,
        "modelopt": modelopt.describe,
        "autofp8": fp8.describe_tensors,
    }
    return describe[packing.layout](packing.schemes, ignore, packing.kv_cache)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json, and the second file that the layout modelopt has."""
    found = config.get("quantization_config", {})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if found.get("quant_method") == "modelopt":
        (folder / modelopt.SIDE_FILE).write_text(json.dumps(modelopt.side_file(found), indent=2) + "\n")


def read_packing(
    config: Mapping[str, Any], linears: Sequence[str], where: Path, plain: Collection[str] = ()
) -> Packing:
    """The packing of the layers `linears` (by their names in files) that a config.json states.

    Args:
        config: as `read_config` returned it.
        linears: every linear layer.
        where: the file, for messages.
        plain: layers whose weight is not in eight bits. An output head among them is not packed, even if the
            configuration does not name it: readers leave heads unpacked, and some writers rely on that.

    Raises:
        ArtifactError: the model is not packed, or in another way. The message lists what was read and required.
    """
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        raise ArtifactError(
            f"{where} has no quantization_config, so the model is not packed: pack it with octavo pack MODEL OUT"
        )
    linears = [name for name in linears if name not in plain or name.rpartition(".")[2] not in HEADS]
    method = found.get("quant_method")
    if method == "fp8":
        return Packing("fp8" if fp8.is_blocks(found) else "autofp8", *fp8.read(found, linears, where))
    if method == "modelopt":
        return Packing("modelopt", *modelopt.read(found, linears, where))
    return Packing("compressed-tensors", *compressed_tensors.read(found, linears, where))


def check_tensors(found: Mapping[str, Tensor], required: Mapping[str, Tensor], where: Path) -> None:
    """Raise an ArtifactError unless `found` has the specs of `required`, is finite, and its scales are positive."""
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
    right = {name: is_positive(t) if name.endswith(_SCALES) else is_finite(t) for name, t in found.items()}
    for name in failing(right):
        if name.endswith(_SCALES):
            check_scale(name, found[name], where)
        raise ArtifactError(f"{where}: {name} holds inf or NaN; {advice}")
