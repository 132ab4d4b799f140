"""Reading casts from JSON values that a person may have written. An error names the field and says what is allowed."""

import difflib
import math
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from octavo.numerics.qtensor import Cast, parse_granularity
from octavo.numerics.scaling import History

_TYPE_NAMES = {str: "a string", int: "an integer", float: "a finite number", bool: "true or false"}


def nearest(name: str, known: Iterable[str]) -> str:
    """A question for the end of "unknown ...": whether one of `known`, with a name much like `name`, was meant."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""


def read_fields(values: object, kinds: Mapping[str, type], where: str) -> dict[str, Any]:
    """`values`, after a check that they are an object with fields of these names and types.

    `where` is the path of the fields, such as y.x; "" for the whole. The caller checks a field of the type `object`.
    """
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{where or 'a recipe'} must be an object with the fields {', '.join(kinds)}; got {_shown(values)}"
        )
    found = dict(values)
    for name, value in found.items():
        path = f"{where}.{name}" if where else name
        if name not in kinds:
            raise ValueError(f"unknown field {path}{_advice(name, kinds)}: the fields are {', '.join(kinds)}")
        if kinds[name] is float and type(value) is int:
            found[name] = value = float(value)
        # type() and not isinstance(): a bool is an int in Python, but never here.
        wrong = kinds[name] is not object and type(value) is not kinds[name]
        if wrong or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{path} must be {_TYPE_NAMES[kinds[name]]}; got {_shown(value)}")
    return found


def _advice(name: str, kinds: Iterable[str]) -> str:
    """Where a field with this name belongs, or the field here with a name much like it."""
    owners: dict[str, Iterable[str]] = {
        "the recipe": ("rotate", "emulate", "exact_backward", "y", "dx", "dw"),
        "a GEMM: y, dx or dw": ("x", "w", "dy", "fast_accumulation"),
        "an operand": _kinds(Cast),
        "a history": _kinds(History),
    }
    others = (owner for owner, names in owners.items() if name in names and not set(names) & set(kinds))
    owner = next(others, None)
    return nearest(name, kinds) if owner is None else f" ({name} is a field of {owner})"


def read_cast(values: object, where: str) -> Cast:
    found = read_fields(values, _kinds(Cast) | {"granularity": str, "history": object}, where)
    if found.get("history") is not None:
        history = read_fields(found["history"], _kinds(History), f"{where}.history")
        found["history"] = _made(History, history, f"{where}.history")
    if "granularity" in found:
        found["granularity"] = _made(parse_granularity, {"name": found["granularity"]}, f"{where}.granularity")
    return _made(Cast, found, where)


def _kinds(cls: type) -> dict[str, Any]:
    types = typing.get_type_hints(cls)
    return {each.name: types[each.name] for each in fields(cls) if each.init}


def _made(make: Any, arguments: Mapping[str, Any], where: str) -> Any:
    try:
        return make(**arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"
