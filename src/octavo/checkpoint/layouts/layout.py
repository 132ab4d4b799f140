"""The packed folder: a model with linear weights in eight bits, in a form that Hugging Face's libraries open.

    OUT/
      config.json          the model in Hugging Face's terms, "dtype": "bfloat16", and a `quantization_config`
      model.safetensors    <module>.weight        e4m3 or int8 [N, K]   of each packed linear layer
                           <module>.weight_scale  as its scheme says (`octavo.checkpoint.scheme`); it multiplies
                           everything else        bfloat16          a tied head is not stored
      tokenizer.json ...   the tokenizer's files

or several files of tensors and their index. The layouts differ in names and in the `quantization_config`. Each is a
`Layout` that its module registers, and nothing outside of that module asks for its name.

Every linear layer is packed unless the configuration names it as ignored. A reader takes a layer that is neither packed
nor ignored for a packed one and computes nonsense without an error. So folders are checked tensor by tensor
(`octavo.checkpoint.packed_folder`).
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.checkpoint.files import ArtifactError, check_match, failing, is_finite, read_json
from octavo.checkpoint.folder import MODULES
from octavo.checkpoint.run import check_config, refuse_run
from octavo.checkpoint.scheme import (
    ADVICE,
    INPUT_SCALE_NAME,
    SCALE_NAME,
    KvScales,
    Scheme,
    check_scale,
    is_kv_scale,
    is_positive,
    kv_names,
    read_number,
    read_scale,
    take_kv_scales,
)

EXPERT_DTYPE = torch.float8_e4m3fn
UNQUANTIZED_DTYPE = torch.bfloat16
# The names of output heads, which readers leave unpacked even if a folder does not name them as ignored.
HEADS = ("lm_head", "embed_out", "score", "classifier")
_CHOOSES_CODE = (
    "attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation", "auto_map",
)  # fmt: skip
_SCALES = (f".{SCALE_NAME}", f".{INPUT_SCALE_NAME}")


class Layout:
    """One way to write a packing down. A subclass has the attributes, `describe`, `read`, and what differs beside them.

    Attributes:
        name: on the command line, and the quant_method of its `quantization_config`.
        schemes: the names of those that it holds, one in a model. Empty if it holds all, and several in one model.
        ignore: the keys under which the `quantization_config` lists unpacked layers; the first is written.
        exact: an entry of that list is a whole name. Otherwise it may also name a module above (`is_named`).
        holds_cache: it has a place for the scales of a KV cache.
        readers: the programs that open it beside Octavo, if transformers does not; else "".
        needs: the package without which transformers does not open it.
        experts: the entry of `ignore` for all experts of a mixture; "" if the names of their modules do.
    """

    name: ClassVar[str]
    schemes: ClassVar[tuple[str, ...]] = ()
    ignore: ClassVar[tuple[str, ...]] = ("ignore",)
    exact: ClassVar[bool] = False
    holds_cache: ClassVar[bool] = True
    readers: ClassVar[str] = ""
    needs: ClassVar[str] = ""
    experts: ClassVar[str] = ""

    # --- The quantization_config -------------------------------------------------------------------------------------

    def describe(self, schemes: Mapping[str, Scheme], ignore: Sequence[str], kv_cache: bool) -> dict[str, Any]:
        """The `quantization_config` of layers packed by `schemes`, with the layers `ignore` unpacked."""
        raise NotImplementedError

    def read(self, found: Mapping[str, Any], linears: Sequence[str], where: Path) -> tuple[dict[str, Scheme], bool]:
        """The scheme of each packed layer, and whether the scales of keys and values are stored. An ArtifactError,
        which lists what was read and required, for a packing of another kind."""
        raise NotImplementedError

    def renew(self, config: dict[str, Any], folder: Path) -> None:
        """Put the settings of an older writer into `quantization_config`, in today's spelling."""

    def describe_parts(self, described: dict[str, Any], schemes: Mapping[str, Scheme]) -> dict[str, Any]:
        """`described`, changed for a program that calls a part of the model, as sentence-transformers does."""
        return described

    def side_files(self, described: Mapping[str, Any]) -> dict[str, Any]:
        """The content of the JSON files that the layout has beside config.json."""
        return {}

    def check_experts(self, schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise a ValueError if the layout has a place for packed experts (by their names in the files, with the shapes
        [N, K] of their weights) in which transformers cannot open them."""

    # --- The tensors -------------------------------------------------------------------------------------------------

    def rename(self, name: str) -> str:
        """The name that the layout gives to the tensor `name`, if that is a scale; else `name`."""
        return name

    def names_in_memory(self, name: str, kv_cache: bool) -> list[str]:
        """The names in memory of a tensor of a file: the inverse of `rename`, for every name that is read."""
        of_output = name.endswith(".output_scale") and not kv_cache  # outputs may have scales, too
        return [name] if of_output else kv_names(name)

    def reshape(self, scale: Tensor, name: str, scheme: Scheme | None) -> Tensor:
        """The tensor `name` of a layer packed by `scheme` (None: of no such layer) as files have it."""
        return scale


LAYOUTS: dict[str, Layout] = {}
HOLDS_ANY = "compressed-tensors"


def register(layout: Layout) -> None:
    LAYOUTS[layout.name] = layout


def get_layout(name: str) -> Layout:
    """The layout of that name; a ValueError names the choices."""
    if name not in LAYOUTS:
        raise ValueError(f"unknown layout {name!r}: choose one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def layout_of(found: Mapping[str, Any]) -> Layout:
    """The layout that a `quantization_config` states. An unknown one counts as the largest, which lists its demands."""
    return LAYOUTS.get(str(found.get("quant_method")), LAYOUTS[HOLDS_ANY])


def check_layout(layout: Layout, schemes: Iterable[Scheme], kv_cache: bool) -> None:
    """Raise a ValueError, which names the alternative, unless `layout` can hold `schemes`, and with `kv_cache` the
    scales of a cache of keys and values."""
    names = sorted({scheme.name for scheme in schemes})
    held = layout.schemes or names
    instead = f"or --layout {HOLDS_ANY}, which holds any"
    if others := [name for name in names if name not in held]:
        what = f"the scheme {held[0]} alone" if len(held) == 1 else f"the schemes {', '.join(held)}"
        raise ValueError(
            f"the layout {layout.name} holds {what}, not {', '.join(others)}: --scheme {held[0]}, {instead}"
        )
    if layout.schemes and len(names) > 1:
        raise ValueError(
            f"the layout {layout.name} holds one scheme in a model, not {' and '.join(names)}: one, {instead}"
        )
    if kv_cache and not layout.holds_cache:
        raise ValueError(
            f"the layout {layout.name} has no place for the scales of a KV cache: {instead.removeprefix('or ')}"
        )


@dataclass(frozen=True)
class Packing:
    """The packing of a folder: its layout, the scheme of each packed layer by its name in the files, and whether the
    scales of a KV cache are stored."""

    layout: Layout
    schemes: Mapping[str, Scheme]
    kv_cache: bool = False

    def to_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the files that hold `tensors`. Scales may have another name and another shape there."""
        rename, reshape = self.layout.rename, self.layout.reshape
        return {rename(n): reshape(t, n, self.schemes.get(n.rpartition(".")[0])) for n, t in tensors.items()}

    def names_in_memory(self, name: str) -> list[str]:
        return self.layout.names_in_memory(name, self.kv_cache)

    def from_files(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `to_files`, for every name, dtype and shape that is read (`octavo.checkpoint.scheme`). An
        ArtifactError if two tensors are the same scale."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            for ours in self.names_in_memory(name):
                if ours in found:
                    raise ArtifactError(f"{name}: the file has this scale under a second name, too; keep one of them")
                found[ours] = self._read(ours, tensor)
        return found

    def take_kv_scales(self, tensors: dict[str, Tensor], linears: Iterable[str], where: Path) -> KvScales:
        """See `octavo.checkpoint.scheme.take_kv_scales`."""
        return take_kv_scales(tensors, linears, self.kv_cache, where)

    def _read(self, name: str, tensor: Tensor) -> Tensor:
        """Convert the tensor `name` (its name in memory) from its form in a file to its form in memory."""
        if is_kv_scale(name):
            return read_number(tensor)
        module, _, leaf = name.rpartition(".")
        is_scale = leaf in (SCALE_NAME, INPUT_SCALE_NAME) and module in self.schemes
        return read_scale(tensor, leaf, self.schemes[module]) if is_scale else tensor


# ---- config.json, with its `quantization_config`.


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a packed folder, with a `quantization_config` in the newest spelling. An ArtifactError if a
    file is not JSON, or the folder is a run."""
    refuse_run(folder)
    check_config(folder, "a folder that octavo pack wrote")
    config = read_json(where := folder / "config.json")
    for layout in LAYOUTS.values():
        layout.renew(config, folder)
    found = config.get("quantization_config")
    if found is not None and not isinstance(found, dict):
        raise ArtifactError(f"{where}: quantization_config must be an object, got {found!r}: pack the model again")
    return config


def quantization_config(packing: Packing, linears: Iterable[str], description: Path | None = None) -> dict[str, Any]:
    """The `quantization_config` of config.json. `linears` are all linear layers, packed or not, by their names in the
    files; modules.json in the folder `description` says that the model is of sentence-transformers."""
    ignore = [name for name in linears if name not in packing.schemes]
    found = packing.layout.describe(packing.schemes, ignore, packing.kv_cache)
    in_parts = description is not None and (description / MODULES).is_file()
    return packing.layout.describe_parts(found, packing.schemes) if in_parts else found


def without_code(described: Any) -> Any:
    """A copy of a parsed config.json without the entries, of the model or a part of it, that choose code.

    They can name a repository of the hub, from which transformers fetches kernels, or Python files of the folder.
    """
    if isinstance(described, dict):
        return {key: without_code(value) for key, value in described.items() if key not in _CHOOSES_CODE}
    return [without_code(value) for value in described] if isinstance(described, list) else described


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json, without entries that choose code, and the other files that its layout has."""
    described = config.get("quantization_config")
    beside = {} if described is None else layout_of(described).side_files(described)
    for name, content in {"config.json": without_code(dict(config)), **beside}.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_packing(
    config: Mapping[str, Any], linears: Sequence[str], where: Path, plain: Collection[str] = ()
) -> Packing:
    """The packing of the layers `linears` (by their names in files) that a config.json of `read_config` states. If the
    model is not packed, or in another way, an ArtifactError lists what was read and required.

    The weights of the layers `plain` are not in eight bits. An output head among them is not packed, even if the
    configuration does not name it: readers leave heads unpacked, and some writers rely on that.
    """
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        raise ArtifactError(
            f"{where} has no quantization_config, so the model is not packed: pack it with octavo pack MODEL OUT"
        )
    linears = [name for name in linears if name not in plain or name.rpartition(".")[2] not in HEADS]
    layout = layout_of(found)
    return Packing(layout, *layout.read(found, linears, where))


def check_tensors(found: Mapping[str, Tensor], required: Mapping[str, Tensor], where: Path) -> None:
    """Raise an ArtifactError unless `found` has the specs of `required`, is finite, and its scales are positive."""
    try:
        check_match(found, required, str(where))
    except ArtifactError as error:
        raise ArtifactError(f"{error}; {ADVICE}") from None
    for name, tensor in found.items():
        if tensor.dtype != required[name].dtype:
            raise ArtifactError(
                f"{where}: {name} must be {required[name].dtype}, the file has {tensor.dtype}; {ADVICE}"
            )
    right = {name: is_positive(t) if name.endswith(_SCALES) else is_finite(t) for name, t in found.items()}
    for name in failing(right):
        if name.endswith(_SCALES):
            check_scale(name, found[name], where)
        raise ArtifactError(f"{where}: {name} holds inf or NaN; {ADVICE}")


# ---- The settings of a `quantization_config`, compared with those that are required.


# Fields of other writers that no reader needs.
_REMARKS = (
    "version", "observer", "observer_kwargs", "ignore", "format", "config_groups", "targets",
    "modules_to_not_convert", "ignored_layers", "exclude_modules", "producer", "fmt", "zp_dtype",
    "global_compression_ratio", "dequantize",
)  # fmt: skip


def differences(found: Mapping[str, Any], required: Mapping[str, Any], path: str) -> list[str]:
    """The fields in which `found` differs from `required`. Empty fields (None, "", []) that are not required are no
    difference."""
    wrong = []
    for key in [*required, *(key for key in found if key not in required)]:
        value, wanted = found.get(key), required.get(key)
        if isinstance(wanted, dict) and isinstance(value, dict):
            wrong += differences(value, wanted, f"{path}.{key}")
        elif key not in _REMARKS and (key in required or value) and value != wanted:
            wrong.append(f"{path}.{key} is {value!r}, required {wanted!r}")
    return wrong


def check_settings(found: Mapping[str, Any], required: Mapping[str, Any], where: Path) -> None:
    """Raise an ArtifactError that lists where the `quantization_config` `found` differs from `required`."""
    if wrong := differences(found, required, "quantization_config"):
        raise ArtifactError(f"{where}: this is a packing that octavo does not run: " + "; ".join(wrong))


def packed_layers(layout: Layout, found: Mapping[str, Any], linears: Sequence[str], where: Path) -> list[str]:
    """The layers of `linears` that a `quantization_config` does not list as unpacked. The list may also name modules
    that are no linear layers, such as norms. An ArtifactError if it is no list of names."""
    key = next((key for key in layout.ignore if found.get(key)), layout.ignore[0])
    ignore = found.get(key) or []
    if not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
        raise ArtifactError(f"{where}: quantization_config.{key} must be a list of module names, got {ignore!r}")
    return [name for name in linears if not any(is_named(entry, name, exact=layout.exact) for entry in ignore)]


def is_named(entry: str, name: str, *, exact: bool) -> bool:
    """True if `entry`, of a list of modules, names the module `name`.

    An entry "re:..." is a regular expression. With `exact` any other entry is a whole name. Without it, the entry may
    also be the name of a parent module, the last parts of the name, or a glob.
    """
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    if exact or entry == name:
        return entry == name
    return name.startswith(f"{entry}.") or name.endswith(f".{entry}") or fnmatchcase(name, entry)
