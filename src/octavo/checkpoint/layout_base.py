"""A layout: one way to write a packing down (`octavo.checkpoint.layouts`), and what the layouts share."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.scheme import Scheme, kv_names


class Layout:
    """One way to write a packing down. A subclass has a name, `describe`, `read`, and what differs beside them."""

    name: ClassVar[str]  # on the command line, and the quant_method of its `quantization_config`
    schemes: ClassVar[tuple[str, ...]] = ()  # that it holds, one in a model; empty if it holds all, several in one
    ignore: ClassVar[tuple[str, ...]] = ("ignore",)  # the keys of the list of unpacked layers; the first is written
    exact: ClassVar[bool] = False  # an entry of that list is a whole name; else it may name a module above (`is_named`)
    written: ClassVar[bool] = True  # Octavo writes it; False: it is read alone
    holds_cache: ClassVar[bool] = True  # it has a place for the scales of a KV cache
    readers: ClassVar[str] = ""  # the programs that open it beside Octavo, if transformers does not
    needs: ClassVar[str] = ""  # the package without which transformers does not open it
    experts: ClassVar[str] = ""  # the entry of `ignore` for all experts of a mixture, if not the names of their modules

    def describe(self, schemes: Mapping[str, Scheme], ignore: Sequence[str], kv_cache: bool) -> dict[str, Any]:
        """The `quantization_config` of layers packed by `schemes`, with the layers `ignore` unpacked."""
        raise NotImplementedError

    def read(self, found: Mapping[str, Any], linears: Sequence[str], where: Path) -> tuple[dict[str, Scheme], bool]:
        """The scheme of each packed layer, and whether the scales of keys and values are stored. An ArtifactError for a
        packing of another kind, with the values found and required."""
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
        """Raise a ValueError if transformers cannot open packed experts (by their names in the files, with the shapes
        [N, K] of their weights) where the layout puts them."""

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
    if not are_names(ignore):
        raise ArtifactError(f"{where}: quantization_config.{key} must be a list of module names, got {ignore!r}")
    return [name for name in linears if not any(is_named(entry, name, exact=layout.exact) for entry in ignore)]


def are_names(found: object) -> bool:
    return isinstance(found, list) and all(isinstance(name, str) for name in found)


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
