"""Declaring settings. A setting is a field of a frozen dataclass, with its default, help and valid values on its line.

A field whose type is another such dataclass is a table. Its settings are named TABLE.KEY:

    a file           [parallel]
                     tp = 2
    a command line   --parallel.tp 2
    code             config.parallel.tp
"""

import functools
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from octavo.recipe import GEMMS

Range = tuple[str, Callable[[Any], bool]]
POSITIVE: Range = ("at least 1", lambda value: value >= 1)
NOT_NEGATIVE: Range = ("0 or more", lambda value: value >= 0)
ABOVE_ZERO: Range = ("above 0", lambda value: value > 0)
FRACTION: Range = ("between 0 and 1, both included", lambda value: 0 <= value <= 1)
INSIDE: Range = ("between 0 and 1, both excluded", lambda value: 0 < value < 1)
BELOW_ONE: Range = ("at least 0 and below 1", lambda value: 0 <= value < 1)
BYTES: Range = ("at least 256 (every byte is a token)", lambda value: value >= 256)
SOME: Range = ("a list of at least one entry", lambda value: len(value) > 0)
NAMED: Range = ("a name that is not empty", lambda value: value != "")
SOME_GEMMS: Range = (f"a list of some of {', '.join(GEMMS)}", lambda value: set(value) <= set(GEMMS))
SEED: Range = ("an integer from 0 to 2^63 - 1", lambda value: 0 <= value < 1 << 63)
DEVICE: Range = ("auto, cpu, cuda or cuda:N", lambda value: re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is not None)
TOKENIZER: Range = (
    "one of bytes, characters, bpe, or hf: and the name or folder of a Hugging Face model",
    lambda value: re.fullmatch(r"bytes|characters|bpe|hf:.+", value) is not None,
)
DEGREE: Range = ("at least 1, or -1 for the processes that are left", lambda value: value >= 1 or value == -1)


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting. `kind` is its type; the default None stands for a derived value."""

    kind: Any
    default: Any
    help: str
    valid: Range | None


def setting(default: Any, help: str, valid: Range | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A field that is a setting. `choices` are all values of a setting that is a name."""
    if choices:
        valid = ("one of " + ", ".join(choices), choices.__contains__)
    return field(default=default, metadata={"help": help, "valid": valid})


def table(kind: type) -> Any:
    """A field that is a table: its settings are the fields of the dataclass `kind`."""
    return field(default=kind(), metadata={"table": kind})


@functools.cache
def settings_of(cls: Any) -> dict[str, Setting]:
    """The settings of a dataclass by name, in the order of declaration; those of a table as TABLE.KEY."""
    kinds = typing.get_type_hints(cls)
    found: dict[str, Setting] = {}
    for each in fields(cls):
        if "table" in each.metadata:
            inner = settings_of(each.metadata["table"])
            found |= {f"{each.name}.{key}": declared for key, declared in inner.items()}
        else:
            found[each.name] = Setting(kinds[each.name], each.default, each.metadata["help"], each.metadata["valid"])
    return found


def flatten(values: Mapping[str, Any], settings: Iterable[str] = ()) -> dict[str, Any]:
    """`values` with the entries of each table as TABLE.KEY. A mapping under the name of a setting stays as it is."""
    names = set(settings)
    tables = {name.partition(".")[0] for name in names if "." in name}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and (key in tables or key not in names):
            flat |= {f"{key}.{inner}": entry for inner, entry in value.items()}
        else:
            flat[key] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`flat` with the entries TABLE.KEY in a dictionary for each table."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        first, dot, key = name.partition(".")
        if dot:
            nested.setdefault(first, {})[key] = value
        else:
            nested[name] = value
    return nested
