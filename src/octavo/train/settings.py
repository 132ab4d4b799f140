"""Reading the values of settings from a command line, a TOML file, or the config.json of a run.

The functions take `kinds`, the type of each setting by its name, and raise a ConfigError that names the setting and
its source.
"""

import difflib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.artifact.files import ArtifactError, parse_object
from octavo.extras import hub_hint
from octavo.recipe import Recipe, get_recipe
from octavo.recipe.presets import RECIPE_FILES

RECIPE = str | Recipe
TYPE_NAMES: dict[Any, str] = {
    RECIPE: "a recipe's name, a .json or .toml file or its fields",
    str: "a string",
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    tuple[str, ...]: "a list of strings",
}
Kinds = Mapping[str, Any]


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type or outside its valid values; the message names it."""


def known_values(values: Mapping[str, object], kinds: Kinds, source: str) -> dict[str, Any]:
    """`values` of `source`, each of the type that its setting requires."""
    return {known_name(key, kinds, source): typed(key, value, kinds, source) for key, value in values.items()}


def known_name(key: str, kinds: Kinds, source: str) -> str:
    """`key`, if it is a setting."""
    if key in kinds:
        return key
    if of_table := [name for name in kinds if name.startswith(f"{key}.")]:
        raise ConfigError(
            f"{key!r} in {source} is a table, not a setting: its settings are {', '.join(map(repr, of_table))}"
        )
    nearest = difflib.get_close_matches(key, list(kinds), n=1, cutoff=0.6)
    advice = f"did you mean {nearest[0]!r}?" if nearest else "octavo train --settings lists all settings"
    raise ConfigError(f"unknown setting {key!r} in {source}; {advice}")


def typed(key: str, value: object, kinds: Kinds, source: str) -> Any:
    """`value` as the type that `key` requires: the only conversions are int to float, list to tuple, file to recipe."""
    required = kinds[key]
    if required == RECIPE:
        return _read_recipe(key, value, source)
    if required is float and type(value) is int:
        value = float(value)
    if isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value):
        value = tuple(value)
        matches = required == tuple[str, ...]
    else:
        # type() and not isinstance(): a bool is an int in Python, but never here.
        matches = type(value) is required and not (isinstance(value, float) and not math.isfinite(value))
    if not matches:
        hint = "; it is no table of settings" if isinstance(value, Mapping) else ""
        raise ConfigError(
            f"{key} in {source} must be {TYPE_NAMES[required]}; got {value!r} ({type(value).__name__}){hint}"
        )
    return value


def plain(value: object) -> object:
    """The value of a setting as JSON has it; `typed` reads it back."""
    return list(value) if isinstance(value, tuple) else value.to_dict() if isinstance(value, Recipe) else value


def _read_recipe(key: str, value: object, source: str) -> str | Recipe:
    """The name of a recipe as it is, and the recipe that a file or a table of fields describes."""
    try:
        if isinstance(value, Mapping):
            return Recipe.from_dict(value)
        if isinstance(value, str):
            return get_recipe(value) if value.endswith(RECIPE_FILES) else value
    except ValueError as error:
        raise ConfigError(f"{key} in {source}: {error}") from error
    if isinstance(value, Recipe):
        return value
    raise ConfigError(f"{key} in {source} must be {TYPE_NAMES[RECIPE]}; got {value!r} ({type(value).__name__})")


# --- Files -------------------------------------------------------------------------------------------------------


PRESETS = {path.stem: path for path in sorted((Path(__file__).parent / "presets").glob("*.toml"))}


def read_file(path: Path) -> dict[str, Any]:
    """The values in a TOML file, or in a JSON file (its name ends in .json) such as the config.json of a run.

    The name of a preset stands for its file, unless there is a file of that name.
    """
    if not path.exists():
        path = PRESETS.get(str(path), path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        hint = f"; the presets are {', '.join(PRESETS)}" if not path.suffix else ""
        hint = hint or hub_hint(path)
        if path.is_dir():
            hint = ": give a TOML file of settings, or the config.json of a run"
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}{hint}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration file {path} must be UTF-8; byte {error.start} is not") from error
    try:
        return parse_object(text, f"configuration file {path}") if path.suffix == ".json" else tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:  # its message ends with the line and column
        raise ConfigError(f"configuration file {path} is not valid TOML: {error}") from error
    except ArtifactError as error:
        raise ConfigError(str(error)) from error


# --- Words -------------------------------------------------------------------------------------------------------


def parse(overrides: Sequence[str], kinds: Kinds) -> dict[str, Any]:
    """Command-line words to typed values by key; `--flag` alone is true and `--no-flag` is false."""
    groups: list[tuple[str, list[str]]] = []
    for word in overrides:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if not equals and name.startswith("no_") and kinds.get(name[3:]) is bool:
                name, equals, value = name[3:], "=", "false"
            groups.append((known_name(name, kinds, "the command line"), [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise ConfigError(f"the command line must give settings as --key value; got {word!r}")
    values: dict[str, Any] = {}
    for key, words in groups:
        value = _parse_words(key, words, kinds)
        if key in values and not isinstance(value, tuple):
            raise ConfigError(f"--{key.replace('_', '-')} must be given once; got it more than once")
        values[key] = values.get(key, ()) + value if isinstance(value, tuple) else value
    return values


def _parse_words(key: str, words: list[str], kinds: Kinds) -> Any:
    required = kinds[key]
    if not words and required is bool:
        return True
    if not words:
        raise ConfigError(f"--{key.replace('_', '-')} needs a value ({TYPE_NAMES[required]})")
    if required == tuple[str, ...]:
        return tuple(word for word in words if word)
    if len(words) > 1:
        raise ConfigError(f"--{key.replace('_', '-')} takes one value; got {' '.join(words)}")
    return typed(key, _parse_word(required, words[0]), kinds, "the command line")


def _parse_word(required: Any, word: str) -> object:
    """The value that `word` spells, or `word` itself, which `typed` then refuses."""
    if required is bool:
        return {"true": True, "false": False}.get(word, word)
    if required is int and re.fullmatch(r"[+-]?[0-9]+", word):
        return int(word)
    if required is float and re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", word):
        return float(word)
    return word
