"""The settings of a `quantization_config`, compared with those that are required."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from octavo.artifact.tensors import ArtifactError

# What other writers add and no reader needs.
_REMARKS = (
    "version",
    "observer",
    "ignore",
    "format",
    "config_groups",
    "targets",
    "modules_to_not_convert",
    "ignored_layers",
    "producer",
    "fmt",
    "zp_dtype",
)


def differences(found: Mapping[str, Any], required: Mapping[str, Any], path: str) -> list[str]:
    """Where `found` says something else than `required`; fields of no content (None, empty) say nothing."""
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
    found: Mapping[str, Any], key: str, linears: Sequence[str], where: Path, wildcards: bool = False
) -> list[str]:
    """Those of `linears` that the list `key` of the `quantization_config` does not leave unpacked.

    Args:
        found: the `quantization_config`.
        key: of the list.
        linears: every linear layer, by its name on disk.
        where: of the file, for the message.
        wildcards: entries may be patterns, as of a shell.

    Raises:
        ArtifactError: no list of names, or a name of no layer. A pattern may match none.
    """
    ignore = found.get(key) or []
    if not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
        raise ArtifactError(f"{where}: quantization_config.{key} must be a list of module names, got {ignore!r}")
    patterns = [name for name in ignore if wildcards and "*" in name]
    names = set(ignore) - set(patterns)
    if unknown := [name for name in ignore if name in names and name not in linears]:
        raise ArtifactError(f"{where}: {key} has {unknown[0]!r}, which is the name of no linear layer: pack it again")
    return [name for name in linears if name not in names and not any(fnmatchcase(name, p) for p in patterns)]
