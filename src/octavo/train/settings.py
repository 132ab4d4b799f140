"""Settings from the words of a command line, a file or the folder of a run, and their list for its help.

Each source overrides the one before: the defaults, a file (TOML, or the config.json of a run), the command line. A
ConfigError names the source.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.checkpoint.files import read_json
from octavo.checkpoint.folder import BUILT_IN_MODELS, RunFolder
from octavo.train.config import LIST, PRESETS, TYPE_NAMES, Config, ConfigError, Setting, get_setting, settings_of
from octavo.util import hub_hint, parse_object, reading

# How the command line spells a number.
NUMBERS = {int: r"[+-]?[0-9]+", float: r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"}
WORDS = "the command line"


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Merge the defaults, the file at `path` (None: no file) and command-line `overrides`. The file is TOML, or the
    config.json of a run; the name of a preset stands for its file. Overrides are `--key value` or `--key=value`.
    Booleans are `true` or `false`, `--key` alone is true and `--no-key` is false. A list takes all values up to the
    next `--key`, may be given again to add more, and is empty if only `--key=` is given."""
    values = {} if path is None else read_file(Path(path))
    return Config.from_dict(values, str(path), parse(overrides))


def read_settings(run: RunFolder) -> Config:
    """The settings of a run, whose folder may have been moved. An ArtifactError if the file is damaged."""
    return Config.from_dict(read_json(run.config) | {"out": str(run.path)}, str(run.config))


def read_file(path: Path) -> dict[str, Any]:
    """The values in a TOML or .json file; the name of a preset stands for its file, unless there is such a file."""
    if not path.exists():
        path = PRESETS.get(str(path), path)
    try:
        text = path.read_bytes()
    except OSError as error:
        hint = f"; the presets are {', '.join(PRESETS)}" if not path.suffix else hub_hint(path)
        if path.is_dir():
            hint = ": give a TOML file of settings, or the config.json of a run"
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}{hint}") from error
    values = parse_object(text, f"configuration file {path}", ConfigError, toml=path.suffix != ".json")
    if not values:
        raise ConfigError(f"configuration file {path} must hold settings, got none: leave it out for the defaults")
    return values


def parse(overrides: Sequence[str]) -> dict[str, Any]:
    """Command-line words to typed values by name; `--flag` alone is true and `--no-flag` is false."""
    groups: list[tuple[Setting, list[str]]] = []
    for word in overrides:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            off = settings_of(Config).get(name.removeprefix("no_")) if name.startswith("no_") and not equals else None
            if off is not None and off.kind is bool:
                groups.append((off, ["false"]))
            else:
                groups.append((get_setting(name, WORDS), [value] if equals else []))
        elif not groups:
            raise ConfigError(f"the command line must give settings as --key value; got {word!r}")
        elif not word and groups[-1][0].kind == LIST:
            option, valid = _option(groups[-1][0]), groups[-1][0].valid
            remedy = f"{option}= for an empty list" if valid is None or valid[1](()) else "at least one entry"
            raise ConfigError(f"{option} has an empty value: give {remedy}")
        else:
            groups[-1][1].append(word)
    values: dict[str, Any] = {}
    for each, words in groups:
        value = _value_of(each, words)
        if each.name in values and each.kind != LIST:
            raise ConfigError(f"{_option(each)} must be given once; got it more than once")
        values[each.name] = values.get(each.name, ()) + value if each.kind == LIST else value
    return values


def _value_of(each: Setting, words: list[str]) -> Any:
    """The value of a setting that `words` of the command line spell; no words are true."""
    if not words and each.kind is not bool:
        raise ConfigError(f"{_option(each)} needs a value ({TYPE_NAMES[each.kind]})")
    if each.kind == LIST:
        return tuple(word for word in words if word)
    if len(words) > 1:
        raise ConfigError(f"{_option(each)} takes one value; got {' '.join(words)}")
    value: Any = words[0] if words else "true"
    if each.kind in NUMBERS and re.fullmatch(NUMBERS[each.kind], value):
        value = each.kind(value)
    elif each.kind is bool:
        value = {"true": True, "false": False}.get(value, value)
    return each.read(value, WORDS)


def _option(each: Setting) -> str:
    return f"--{each.name.replace('_', '-')}"


# The vocabularies of the tokenizers that the presets name.
_KNOWN = dict.fromkeys(("Llama-3.2-1B", "Meta-Llama-3-8B", "Meta-Llama-3-70B"), 128256)


def known_vocabulary(config: Config) -> int | None:
    """The size of the vocabulary that the settings name, without training, downloading or importing a tokenizer. None
    if only a tokenizer tells that is not here, or that has no tokenizer.json."""
    if config.tokenizer == "bpe":
        return config.vocabulary
    if config.tokenizer in ("bytes", "characters") or config.model not in BUILT_IN_MODELS:
        return 256
    name = config.tokenizer.removeprefix("hf:")
    path = Path(name) / "tokenizer.json"
    if not path.is_file():
        return _KNOWN.get(name.removeprefix("meta-llama/"))
    found = read_json(path)
    with reading(path, "a vocabulary, and a list of added tokens"):
        vocabulary = found["model"]["vocab"]  # a mapping to ids, or in a unigram model a list of [token, score]
        tokens = vocabulary if isinstance(vocabulary, dict) else [token for token, _ in vocabulary]
        return len({*tokens, *(each["content"] for each in found.get("added_tokens", ()))})
