"""A training run is one flat, frozen record of settings: `Config`.

There are three sources, each overriding the one before: the defaults below, a TOML file, the command line. All
share one namespace (no tables, no nesting), so a key reads the same in the file (`kv_heads = 2`), on the command
line (`--kv-heads 2`) and in code (`config.kv_heads`). A setting's default, help and valid values stand on its line;
what concerns several settings at once (heads dividing the width, say) is checked after them. Whoever holds a
`Config` holds a valid one: every way of making one goes through `__post_init__`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from octavo.models import BUILT_IN_MODELS


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type or outside its valid values; the message names it."""


_Range = tuple[str, Callable[[Any], bool]]
_POSITIVE: _Range = ("at least 1", lambda value: value >= 1)
_NOT_NEGATIVE: _Range = ("0 or more", lambda value: value >= 0)
_ABOVE_ZERO: _Range = ("above 0", lambda value: value > 0)
_FRACTION: _Range = ("between 0 and 1, both included", lambda value: 0 <= value <= 1)
_INSIDE: _Range = ("between 0 and 1, both excluded", lambda value: 0 < value < 1)
_BELOW_ONE: _Range = ("at least 0 and below 1", lambda value: 0 <= value < 1)
_BYTES: _Range = ("at least 256 (every byte is a token)", lambda value: value >= 256)
_SOME: _Range = ("a list of at least one entry", lambda value: len(value) > 0)
_NAMED: _Range = ("a name that is not empty", lambda value: value != "")
_DEVICE: _Range = ("auto, cpu, cuda or cuda:N", lambda value: re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is not None)


def _setting(default: Any, help: str, valid: _Range | None = None, choices: tuple[str, ...] = ()) -> Any:
    if choices:
        valid = ("one of " + ", ".join(choices), choices.__contains__)
    return field(default=default, metadata={"help": help, "valid": valid})


@dataclass(frozen=True)
class Config:
    """All settings of a training run; immutable, hashable, a JSON round trip by `to_dict` and `from_dict`.

    Raises:
        ConfigError: a value of the wrong type, outside its range, or in conflict with another setting.
    """

    # Model
    model: str = _setting("llama", "llama, gpt2, or a local Hugging Face folder", _NAMED)
    layers: int = _setting(4, "transformer blocks", _POSITIVE)
    width: int = _setting(256, "features of the residual stream", _POSITIVE)
    heads: int = _setting(4, "query heads of an attention", _POSITIVE)
    kv_heads: int = _setting(2, "key and value heads of an attention (llama)", _POSITIVE)
    mlp_width: int = _setting(704, "hidden features of the MLP (llama; gpt2 has 4 * width)", _POSITIVE)
    context: int = _setting(512, "tokens in a sequence", _POSITIVE)
    tied: bool = _setting(True, "share the weight of the embedding with the output projection")
    rope_theta: float = _setting(10000.0, "base of the rotary position embedding (llama)", _ABOVE_ZERO)

    # FP8
    recipe: str = _setting("rowwise", "name of the FP8 recipe; auto: what this device runs best", _NAMED)
    skip: tuple[str, ...] = _setting((), "globs of the linear layers that stay in BF16")
    only_if_faster: bool = _setting(False, "leave in BF16 the layers that FP8 does not speed up on this GPU")
    emulate: bool = _setting(False, "allow emulated GEMMs on a GPU that lacks the native one")

    # Data
    data: tuple[str, ...] = _setting(("stdlib",), "text: stdlib, files, folders, globs, hf:DATASET", _SOME)
    tokenizer: str = _setting("bytes", "bytes, or bpe (trained on the data)", choices=("bytes", "bpe"))
    vocabulary: int = _setting(4096, "tokens to train (bpe)", _BYTES)
    validation_fraction: float = _setting(0.05, "share of the tokens held out for evaluation", _INSIDE)

    # Optimization
    steps: int = _setting(500, "optimizer steps", _POSITIVE)
    batch: int = _setting(4, "sequences in a micro-batch", _POSITIVE)
    accumulate: int = _setting(1, "micro-batches in a step", _POSITIVE)
    seed: int = _setting(0, "seed of the initial weights and of the order of the data", _NOT_NEGATIVE)
    learning_rate: float = _setting(1e-3, "peak learning rate", _ABOVE_ZERO)
    min_learning_rate: float = _setting(1e-4, "learning rate at the end", _NOT_NEGATIVE)
    schedule: str = _setting("cosine", "cosine, or wsd (warmup, stable, decay)", choices=("cosine", "wsd"))
    warmup: int = _setting(20, "steps of linear warmup", _NOT_NEGATIVE)
    decay: float = _setting(0.2, "share of the steps spent in the final decay (wsd)", _FRACTION)
    weight_decay: float = _setting(0.1, "decoupled weight decay", _NOT_NEGATIVE)
    beta1: float = _setting(0.9, "decay of the first moment", _BELOW_ONE)
    beta2: float = _setting(0.95, "decay of the second moment", _BELOW_ONE)
    clip: float = _setting(1.0, "largest norm of the gradient; 0 turns clipping off", _NOT_NEGATIVE)

    # Machine
    device: str = _setting("auto", "auto, cpu, cuda or cuda:N", _DEVICE)
    precision: str = _setting("bf16", "precision of what is not FP8", choices=("bf16", "fp32", "fp16"))
    compile: bool = _setting(False, "compile the model with torch.compile")
    checkpoint_activations: bool = _setting(False, "recompute the activations of a block in its backward")
    deterministic: bool = _setting(False, "use deterministic algorithms only")

    # Output
    out: str = _setting("runs/train", "folder of the run", _NAMED)
    log_every: int = _setting(10, "steps between log lines", _POSITIVE)
    evaluate_every: int = _setting(100, "steps between evaluations", _POSITIVE)
    evaluate_batches: int = _setting(20, "micro-batches in an evaluation", _POSITIVE)
    save_every: int = _setting(100, "steps between checkpoints", _POSITIVE)
    keep: int = _setting(3, "newest checkpoints to keep", _POSITIVE)
    tensorboard: bool = _setting(False, "write TensorBoard events as well")
    sample: int = _setting(0, "tokens to sample at each evaluation", _NOT_NEGATIVE)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = _typed(each.name, getattr(self, each.name), "Config()")
            object.__setattr__(self, each.name, value)
            valid = each.metadata["valid"]
            if valid is not None and not valid[1](value):
                raise ConfigError(f"{each.name} must be {valid[0]}; got {value!r}")
        _check_model_name(self)
        if self.model in BUILT_IN_MODELS:
            _check_heads(self)
        _check_schedule(self)

    @classmethod
    def load(cls, path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
        """Merge the defaults, the TOML file at `path` (None: no file) and command-line `overrides`.

        Overrides are `--key value` or `--key=value`; booleans are `true` or `false`; a list takes all values up to
        the next `--key`, may be given again to add more, and is empty if only `--key=` is given.
        """
        values = {} if path is None else _known(_read_toml(Path(path)), str(path))
        return cls(**(values | _parse(overrides)))

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Config:
        """The inverse of `to_dict`; keys that are missing take their defaults."""
        return cls(**_known(values, "the dictionary"))

    def to_dict(self) -> dict[str, Any]:
        """All settings as JSON-compatible values: tuples become lists."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    def replace(self, overrides: Sequence[str]) -> Config:
        """A copy with command-line `overrides` applied (in the form that `load` takes)."""
        return dataclasses.replace(self, **_parse(overrides))


def describe() -> list[tuple[str, str, object, str]]:
    """(name, type, default, help) of every setting, in the order of declaration."""
    types = _types()
    return [(each.name, _TYPE_NAMES[types[each.name]], each.default, each.metadata["help"]) for each in fields(Config)]


# --- Types -----------------------------------------------------------------------------------------------------

_TYPE_NAMES: dict[Any, str] = {
    str: "a string",
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    tuple[str, ...]: "a list of strings",
}


@functools.cache
def _types() -> dict[str, Any]:
    return typing.get_type_hints(Config)


def _known(values: Mapping[str, object], source: str) -> dict[str, Any]:
    return {key: _typed(_key(key, source), value, source) for key, value in values.items()}


def _key(key: str, source: str) -> str:
    names = [each.name for each in fields(Config)]
    if key in names:
        return key
    nearest = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    advice = f"did you mean {nearest[0]!r}?" if nearest else "the settings are " + ", ".join(names)
    raise ConfigError(f"unknown setting {key!r} in {source}; {advice}")


def _typed(key: str, value: object, source: str) -> Any:
    """`value` as the type that `key` requires: the only conversions are int to float and list to tuple."""
    required = _types()[key]
    if required is float and type(value) is int:
        value = float(value)
    if isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value):
        value = tuple(value)
        matches = required == tuple[str, ...]
    else:
        # type() and not isinstance(): a bool is an int in Python, but never here.
        matches = type(value) is required and not (isinstance(value, float) and not math.isfinite(value))
    if not matches:
        raise ConfigError(_wrong_type(key, value, source))
    return value


def _wrong_type(key: str, value: object, source: str) -> str:
    hint = "; the file is flat, write its settings without a table" if isinstance(value, Mapping) else ""
    return f"{key} in {source} must be {_TYPE_NAMES[_types()[key]]}; got {value!r} ({type(value).__name__}){hint}"


# --- Sources ---------------------------------------------------------------------------------------------------


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration file {path} must be UTF-8; byte {error.start} is not") from error
    except tomllib.TOMLDecodeError as error:  # its message ends with the line and column
        raise ConfigError(f"configuration file {path} is not valid TOML: {error}") from error


def _parse(overrides: Sequence[str]) -> dict[str, Any]:
    """Command-line words to typed values by key."""
    groups: list[tuple[str, list[str]]] = []
    for word in overrides:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            groups.append((_key(name.replace("-", "_"), "the command line"), [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise ConfigError(f"the command line must give settings as --key value; got {word!r}")
    values: dict[str, Any] = {}
    for key, words in groups:
        value = _parse_words(key, words)
        if key in values and not isinstance(value, tuple):
            raise ConfigError(f"--{key.replace('_', '-')} must be given once; got it more than once")
        values[key] = values.get(key, ()) + value if isinstance(value, tuple) else value
    return values


def _parse_words(key: str, words: list[str]) -> Any:
    required = _types()[key]
    if not words:
        raise ConfigError(f"--{key.replace('_', '-')} needs a value ({_TYPE_NAMES[required]})")
    if required == tuple[str, ...]:
        return tuple(word for word in words if word)
    if len(words) > 1:
        raise ConfigError(f"--{key.replace('_', '-')} takes one value; got {' '.join(words)}")
    return _typed(key, _parse_word(required, words[0]), "the command line")


def _parse_word(required: Any, word: str) -> object:
    """The value that `word` spells; `word` itself where it spells none, which `_typed` then refuses."""
    if required is bool:
        return {"true": True, "false": False}.get(word, word)
    if required is int and re.fullmatch(r"[+-]?[0-9]+", word):
        return int(word)
    if required is float and re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", word):
        return float(word)
    return word


# --- What concerns several settings ------------------------------------------------------------------------------


def _check_model_name(config: Config) -> None:
    # A bare word that is no folder is a misspelt name. A path is left to who opens it: the settings of a finished
    # run must still be readable where its base model is not.
    if config.model not in BUILT_IN_MODELS and "/" not in config.model and not Path(config.model).is_dir():
        names = ", ".join(BUILT_IN_MODELS)
        raise ConfigError(f"model must be one of {names}, or a local Hugging Face folder; got {config.model!r}")


def _check_heads(config: Config) -> None:
    width, heads, kv_heads, rope = config.width, config.heads, config.kv_heads, config.model == "llama"
    if width % heads or (rope and width // heads % 2):
        counts = [n for n in range(1, width + 1) if width % n == 0 and not (rope and width // n % 2)]
        nearby = ", ".join(map(str, sorted(sorted(counts, key=lambda n: abs(n - heads))[:4])))
        advice = f"for this width, heads can be {nearby}" if nearby else "make the width even"
    if width % heads:
        raise ConfigError(f"heads must divide width; got heads {heads} and width {width}; {advice}")
    if rope and width // heads % 2:
        raise ConfigError(
            f"the head dimension, width / heads, must be even (RoPE turns pairs of features); "
            f"got {width} / {heads} = {width // heads}; {advice}"
        )
    if rope and heads % kv_heads:
        counts = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"kv_heads must divide heads; got kv_heads {kv_heads} and heads {heads}; "
            f"for these heads, kv_heads can be {', '.join(map(str, counts))}"
        )


def _check_schedule(config: Config) -> None:
    if config.min_learning_rate > config.learning_rate:
        raise ConfigError(
            f"min_learning_rate must be at most learning_rate; "
            f"got min_learning_rate {config.min_learning_rate} and learning_rate {config.learning_rate}"
        )
    if config.warmup >= config.steps:
        raise ConfigError(f"warmup must be below steps; got warmup {config.warmup} and steps {config.steps}")
    if config.schedule == "wsd" and config.warmup > config.steps * (1 - config.decay):
        raise ConfigError(
            f"warmup and decay must fit in the steps; got warmup {config.warmup} and "
            f"decay {config.decay} of {config.steps} steps ({config.decay * config.steps:g})"
        )
