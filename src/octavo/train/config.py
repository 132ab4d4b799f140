"""A training run is one flat, frozen record of settings: `Config`.

There are three sources, each overriding the one before: the defaults below, a file (TOML, or the config.json of a run),
the command line. All share one namespace (no tables, no nesting), so a key reads the same in the file
(`kv_heads = 2`), on the command line (`--kv-heads 2`) and in code (`config.kv_heads`). A setting's default, help and
valid values stand on its line. Conditions on several settings (such as heads dividing the width) are checked after
them. Every `Config` is valid, because every way of making one goes through `__post_init__`.

A setting with the default None follows from others (`octavo.train.derived`). A `Config` holds its derived value and the
names of all derived settings. `replace` derives such a setting again when a setting that it follows from changes.
"""

import functools
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from octavo.models import BUILT_IN_MODELS
from octavo.train.derived import RULES, outdated
from octavo.train.settings import TYPE_NAMES, ConfigError, known_values, parse, read_file, typed

__all__ = ["Config", "ConfigError", "describe"]

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
_SEED: _Range = ("an integer from 0 to 2^63 - 1", lambda value: 0 <= value < 1 << 63)
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
    kv_heads: int = _setting(None, "key and value heads of an attention (llama)", _POSITIVE)
    mlp_width: int = _setting(704, "hidden features of the MLP (llama; gpt2 has 4 * width)", _POSITIVE)
    context: int = _setting(None, "tokens in a sequence", _POSITIVE)
    tied: bool = _setting(True, "share the weight of the embedding with the output projection")
    bias: bool = _setting(True, "biases in linear layers and norms (gpt2)")
    dropout: float = _setting(0.0, "probability of dropout (llama, gpt2)", _BELOW_ONE)
    rope_theta: float = _setting(10000.0, "base of the rotary position embedding (llama)", _ABOVE_ZERO)

    # FP8
    recipe: str = _setting("rowwise", "name of the FP8 recipe; auto: what this device runs best", _NAMED)
    skip: tuple[str, ...] = _setting((), "globs of the linear layers that stay in BF16")
    only_if_faster: bool = _setting(False, "leave in BF16 the layers that FP8 does not speed up on this GPU")
    emulate: bool = _setting(False, "allow emulated GEMMs on a GPU that lacks the native one")

    # Data
    data: tuple[str, ...] = _setting(("stdlib",), "text: stdlib, files, folders, globs, hf:DATASET", _SOME)
    tokenizer: str = _setting(
        "bytes", "bytes, characters (of the data), or bpe (trained on the data)", choices=("bytes", "characters", "bpe")
    )
    vocabulary: int = _setting(4096, "tokens to train (bpe)", _BYTES)
    sampling: str = _setting(
        "epochs",
        "epochs: every sequence once before any twice; random: sequences at random offsets",
        choices=("epochs", "random"),
    )
    validation_fraction: float = _setting(0.05, "share of the tokens held out for evaluation", _INSIDE)

    # Optimization
    steps: int = _setting(500, "optimizer steps", _POSITIVE)
    batch: int = _setting(4, "sequences in a micro-batch", _POSITIVE)
    accumulate: int = _setting(1, "micro-batches in a step", _POSITIVE)
    seed: int = _setting(0, "seed of the initial weights and of the order of the data", _SEED)
    learning_rate: float = _setting(None, "peak learning rate", _ABOVE_ZERO)
    min_learning_rate: float = _setting(None, "learning rate at the end", _NOT_NEGATIVE)
    schedule: str = _setting("cosine", "cosine, or wsd (warmup, stable, decay)", choices=("cosine", "wsd"))
    warmup: int = _setting(None, "steps of linear warmup", _NOT_NEGATIVE)
    decay_steps: int = _setting(None, "steps until the learning rate is at its end, where it stays", _POSITIVE)
    decay: float = _setting(0.2, "share of decay_steps spent in the final decay (wsd)", _FRACTION)
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
        kinds, derived = _kinds(), set()
        for each in fields(self):
            value = getattr(self, each.name)
            if value is None and each.name in RULES:
                derived.add(each.name)
            else:
                object.__setattr__(self, each.name, typed(each.name, value, kinds, "Config()"))
        for name, rule in RULES.items():
            if name in derived:
                object.__setattr__(self, name, rule.value(vars(self)))
        object.__setattr__(self, "_derived", frozenset(derived))
        for each in fields(self):
            value, valid = getattr(self, each.name), each.metadata["valid"]
            if valid is not None and not valid[1](value):
                raise ConfigError(f"{each.name} must be {valid[0]}; got {value!r}")
        _check_model(self)
        if self.model in BUILT_IN_MODELS:
            _check_heads(self)
        _check_schedule(self)

    @property
    def derived(self) -> frozenset[str]:
        """The names of the settings that follow from others."""
        found: frozenset[str] = vars(self)["_derived"]
        return found

    @classmethod
    def load(cls, path: str | Path | None, overrides: Sequence[str] = ()) -> Self:
        """Merge the defaults, the file at `path` (None: no file) and command-line `overrides`.

        The file is TOML, or the config.json of a run. Overrides are `--key value` or `--key=value`; booleans are
        `true` or `false`, `--key` alone is true and `--no-key` is false; a list takes all values up to the next
        `--key`, may be given again to add more, and is empty if only `--key=` is given.
        """
        values = {} if path is None else read_file(Path(path))
        return cls._merge(values, parse(overrides, _kinds()), str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> Self:
        return cls._merge(values, {}, "the dictionary")

    def to_dict(self) -> dict[str, Any]:
        """All settings as JSON-compatible values, and under "derived" the names of those that follow from others."""
        values = {each.name: getattr(self, each.name) for each in fields(self)} | {"derived": sorted(self.derived)}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    def replace(self, overrides: Sequence[str]) -> Self:
        """A copy with command-line `overrides` applied (in the form that `load` takes)."""
        return self.change(**parse(overrides, _kinds()))

    def change(self, **values: Any) -> Self:
        """A copy with other `values`. A setting that was derived from one of them is derived again."""
        return self._merge(self.to_dict(), values, "Config.change()")

    @classmethod
    def _merge(cls, values: Mapping[str, Any], changes: Mapping[str, Any], source: str) -> Self:
        names = values.get("derived", [])
        if not isinstance(names, list) or not set(names) <= RULES.keys():
            raise ConfigError(f"derived in {source} must be a list of some of {', '.join(RULES)}; got {names!r}")
        stale = outdated(names, changes)
        kept = {key: value for key, value in values.items() if key != "derived" and key not in stale}
        config = cls(**(known_values(kept, _kinds(), source) | dict(changes)))
        object.__setattr__(config, "_derived", config.derived | (set(names) - changes.keys()))
        return config


def describe() -> list[tuple[str, str, object, str]]:
    """(name, type, default, help) of every setting, in the order of declaration; a derived default in words."""
    kinds = _kinds()
    rows = []
    for each in fields(Config):
        default = RULES[each.name].words if each.default is None else each.default
        rows.append((each.name, TYPE_NAMES[kinds[each.name]], default, each.metadata["help"]))
    return rows


@functools.cache
def _kinds() -> dict[str, Any]:
    return typing.get_type_hints(Config)


# --- What concerns several settings ------------------------------------------------------------------------------


def _check_model(config: Config) -> None:
    # A bare word that is no folder is a misspelt name. A path is left to who opens it: the settings of a finished
    # run must still be readable where its base model is not.
    if config.model not in BUILT_IN_MODELS and "/" not in config.model and not Path(config.model).is_dir():
        names = ", ".join(BUILT_IN_MODELS)
        raise ConfigError(f"model must be one of {names}, or a local Hugging Face folder; got {config.model!r}")
    if config.dropout and config.model not in BUILT_IN_MODELS:
        raise ConfigError(
            f"dropout is for the models {', '.join(BUILT_IN_MODELS)}; the config.json of {config.model} says what "
            "dropout that model has: change it there"
        )


def _check_heads(config: Config) -> None:
    width, heads, kv_heads, rope = config.width, config.heads, config.kv_heads, config.model == "llama"
    if width % heads or (rope and width // heads % 2):
        counts = [n for n in range(1, min(width, 1024) + 1) if width % n == 0 and not (rope and width // n % 2)]
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
        counts = [n for n in range(1, min(heads, 1024) + 1) if heads % n == 0]
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
    steps = config.decay_steps
    name = "steps" if "decay_steps" in config.derived else "decay_steps"
    if config.warmup >= steps:
        raise ConfigError(f"warmup must be below {name}; got warmup {config.warmup} and {name} {steps}")
    if config.schedule == "wsd" and config.warmup > steps * (1 - config.decay):
        raise ConfigError(
            f"warmup and decay must fit in the steps; got warmup {config.warmup} and "
            f"decay {config.decay} of {steps} {name} ({config.decay * steps:g})"
        )
