"""The settings of a `quantization_config`, compared with those that are required."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from octavo.artifact.files import ArtifactError

# Fields of other writers that no reader needs.
_REMARKS = (
    "version", "observer", "observer_kwargs", "ignore", "format", "config_groups", "targets",
    "modules_to_not_convert", "ignored_layers", "exclude_modules", "producer", "fmt", "zp_dtype",
    "global_compression_ratio",
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


def packed_layers(
    found: Mapping[str, Any], key: str, linears: Sequence[str], where: Path, *, exact: bool = False
) -> list[str]:
    """The layers of `linears` that the list `key` of the `quantization_config` does not leave unpacked.

    The list may also name modules that are no linear layers, such as norms.

    Args:
        found: the `quantization_config`.
        key: of the list.
        linears: every linear layer, by its name on disk.
        where: of the file, for the message.
        exact: see `is_named`.

    Raises:
        ArtifactError: it is no list of names.
    """
    ignore = found.get(key) or []
    if not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
        raise ArtifactError(f"{where}: quantization_config.{key} must be a list of module names, got {ignore!r}")
    return [name for name in linears if not any(is_named(entry, name, exact=exact) for entry in ignore)]


def is_named(entry: str, name: str, *, exact: bool) -> bool:
    """Whether `entry`, of a list of modules, names the module `name`.

    An entry "re:..." is a regular expression. With `exact` any other entry is a whole name. Without it, the entry may
    also be the name of a parent module, the last parts of the name, or a glob.
    """
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    if exact or entry == name:
        return entry == name
    return name.startswith(f"{entry}.") or name.endswith(f".{entry}") or fnmatchcase(name, entry)
