"""A training run is one frozen record of settings: `Config`.

There are three sources, each overriding the one before: the defaults below, a file (TOML, or the config.json of a run),
the command line (`octavo.train.settings`). Conditions on several settings (such as heads dividing the width) are
checked after them. Every `Config` is valid, because every way of making one goes through `__post_init__`.

A setting with the default None follows from others. A `Config` holds its derived value and the
names of all derived settings. `change` derives such a setting again when a setting that it follows from changes.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from octavo.checkpoint.files import read_json, replace_file
from octavo.checkpoint.run import BUILT_IN_MODELS, RunFolder
from octavo.recipe import GEMMS, Recipe, delayed
from octavo.train.settings import (
    NAMED,
    NOT_NEGATIVE,
    POSITIVE,
    PRESETS,
    TYPE_NAMES,
    ActivationCheckpointing,
    AttentionSettings,
    Compile,
    ConfigError,
    ExpertSettings,
    LossSettings,
    OptimizerSettings,
    Parallel,
    Range,
    WatchSettings,
    find_setting,
    flatten,
    nest,
    parse,
    read_file,
    setting,
    settings_of,
    table,
)
from octavo.util import reading

__all__ = ["Config", "ConfigError", "describe"]

ABOVE_ZERO: Range = ("above 0", lambda value: value > 0)
FRACTION: Range = ("between 0 and 1, both included", lambda value: 0 <= value <= 1)
INSIDE: Range = ("between 0 and 1, both excluded", lambda value: 0 < value < 1)
BELOW_ONE: Range = ("at least 0 and below 1", lambda value: 0 <= value < 1)
BYTES: Range = ("at least 256 (every byte is a token)", lambda value: value >= 256)
SOME: Range = ("a list of at least one entry", lambda value: len(value) > 0)
SOME_GEMMS: Range = (f"a list of some of {', '.join(GEMMS)}", lambda value: set(value) <= set(GEMMS))
SEED: Range = ("an integer from 0 to 2^63 - 1", lambda value: 0 <= value < 1 << 63)
DEVICE: Range = ("auto, cpu, cuda or cuda:N", lambda value: re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is not None)
TOKENIZER: Range = (
    "one of bytes, characters, bpe, or hf: and the name or folder of a Hugging Face model",
    lambda value: re.fullmatch(r"bytes|characters|bpe|hf:.+", value) is not None,
)


@dataclass(frozen=True)
class Rule:
    """The rule of a derived setting: the settings it follows from, the function of all settings, and its words."""

    sources: tuple[str, ...]
    value: Callable[[Mapping[str, Any]], Any]
    words: str


def _warmup(values: Mapping[str, Any]) -> int:
    steps = int(values["decay_steps"])
    room = int(steps * (1 - values["decay"])) if values["schedule"] == "wsd" else steps
    return min(20, steps // 10, room)


# In the order of derivation: what follows from a derived setting stands after it.
RULES: dict[str, Rule] = {
    "learning_rate": Rule(
        ("model",), lambda v: 1e-3 if v["model"] in BUILT_IN_MODELS else 2e-5, "1e-3; to fine-tune 2e-5"
    ),
    "min_learning_rate": Rule(("learning_rate",), lambda v: v["learning_rate"] / 10, "learning_rate / 10"),
    "decay_steps": Rule(("steps",), lambda v: v["steps"], "steps"),
    "warmup": Rule(("decay_steps", "schedule", "decay"), _warmup, "decay_steps / 10, at most 20"),
    "kv_heads": Rule(("heads",), lambda v: 2 - v["heads"] % 2, "2; 1 if heads is odd"),
    "context": Rule(("model",), lambda v: 512, "512, at most a model folder's positions"),
}


@dataclass(frozen=True)
class Config:
    """All settings of a training run; immutable, hashable, a JSON round trip by `to_dict` and `from_dict`.

    Raises:
        ConfigError: a value of the wrong type, outside its range, or in conflict with another setting.
    """

    # Model
    model: str = setting("llama", "llama, mixture, gpt2, or a local Hugging Face folder", NAMED)
    layers: int = setting(4, "transformer blocks", POSITIVE)
    width: int = setting(256, "features of the residual stream", POSITIVE)
    heads: int = setting(4, "query heads of an attention", POSITIVE)
    kv_heads: int = setting(None, "key and value heads of an attention (llama, mixture)", POSITIVE)
    mlp_width: int = setting(704, "hidden features of the MLP, or of an expert (gpt2 has 4 * width)", POSITIVE)
    context: int = setting(None, "tokens in a sequence", POSITIVE)
    tied: bool = setting(True, "share the weight of the embedding with the output projection")
    bias: bool = setting(True, "biases in linear layers and norms (gpt2)")
    dropout: float = setting(0.0, "probability of dropout (llama, mixture, gpt2)", BELOW_ONE)
    rope_theta: float = setting(10000.0, "base of the rotary position embedding (llama, mixture)", ABOVE_ZERO)
    experts: ExpertSettings = table(ExpertSettings)

    # FP8
    recipe: str | Recipe = setting("rowwise", "an FP8 recipe; auto: what this device runs best", NAMED)
    skip: tuple[str, ...] = setting((), "globs of the linear layers that stay in BF16")
    bf16_gemms: tuple[str, ...] = setting((), "GEMMs of every layer that stay in BF16: some of y, dx, dw", SOME_GEMMS)
    calibration: str = setting("", "folder of octavo calibrate for the model: the first scales of the recipe delayed")
    only_if_faster: bool = setting(False, "leave in BF16 the layers that FP8 does not speed up on this GPU")
    emulate: bool = setting(False, "allow emulated GEMMs on a GPU that lacks the native one")
    attention: AttentionSettings = table(AttentionSettings)

    # Data
    data: tuple[str, ...] = setting(("stdlib",), "text: stdlib, files, folders, globs, hf:DATASET", SOME)
    tokenizer: str = setting(
        "bytes", "bytes, characters (of the data), bpe (trained on the data), or hf:NAME_OR_FOLDER", TOKENIZER
    )
    vocabulary: int = setting(4096, "tokens to train (bpe)", BYTES)
    sampling: str = setting(
        "epochs",
        "epochs: every sequence once before any twice; random: sequences at random offsets",
        choices=("epochs", "random"),
    )
    validation_fraction: float = setting(0.05, "share of the tokens held out for evaluation", INSIDE)

    # Start
    branch: str = setting(
        "", "checkpoint of another run, RUN/step-N, whose weights, moments and step the run starts with"
    )
    disturb: float = setting(0.0, "of a branch: multiply each weight by 1 + disturb * a normal number once", BELOW_ONE)

    # Optimization
    steps: int = setting(500, "optimizer steps", POSITIVE)
    batch: int = setting(4, "sequences in a micro-batch", POSITIVE)
    accumulate: int = setting(1, "micro-batches in a step", POSITIVE)
    seed: int = setting(0, "seed of the initial weights and of the order of the data", SEED)
    learning_rate: float = setting(None, "peak learning rate", ABOVE_ZERO)
    min_learning_rate: float = setting(None, "learning rate at the end", NOT_NEGATIVE)
    schedule: str = setting("cosine", "cosine, or wsd (warmup, stable, decay)", choices=("cosine", "wsd"))
    warmup: int = setting(None, "steps of linear warmup", NOT_NEGATIVE)
    decay_steps: int = setting(None, "steps until the learning rate is at its end, where it stays", POSITIVE)
    decay: float = setting(0.2, "share of decay_steps spent in the final decay (wsd)", FRACTION)
    weight_decay: float = setting(0.1, "decoupled weight decay", NOT_NEGATIVE)
    beta1: float = setting(0.9, "decay of the first moment", BELOW_ONE)
    beta2: float = setting(0.95, "decay of the second moment", BELOW_ONE)
    clip: float = setting(1.0, "largest norm of the gradient; 0 turns clipping off", NOT_NEGATIVE)
    loss: LossSettings = table(LossSettings)
    optimizer: OptimizerSettings = table(OptimizerSettings)

    # Machine
    device: str = setting("auto", "auto, cpu, cuda or cuda:N", DEVICE)
    precision: str = setting("bf16", "precision of what is not FP8", choices=("bf16", "fp32", "fp16"))
    deterministic: bool = setting(False, "use deterministic algorithms only")
    compile: Compile = table(Compile)
    activation_checkpointing: ActivationCheckpointing = table(ActivationCheckpointing)
    parallel: Parallel = table(Parallel)

    # Output
    out: str = setting("runs/train", "folder of the run", NAMED)
    log_every: int = setting(10, "steps between log lines", POSITIVE)
    evaluate_every: int = setting(100, "steps between evaluations", POSITIVE)
    evaluate_batches: int = setting(20, "micro-batches in an evaluation", POSITIVE)
    save_every: int = setting(100, "steps between checkpoints", POSITIVE)
    keep: int = setting(3, "newest checkpoints to keep", POSITIVE)
    tensorboard: bool = setting(False, "write TensorBoard events as well")
    wandb: bool = setting(False, "send the numbers to Weights & Biases as well")
    sample: int = setting(0, "tokens to sample at each evaluation", NOT_NEGATIVE)
    watch: WatchSettings = table(WatchSettings)

    derived: frozenset[str] = field(default=frozenset(), compare=False, repr=False)  # the names of derived settings

    def __post_init__(self) -> None:
        settings = settings_of(Config)
        values = {name: attrgetter(name)(self) for name in settings}
        derived = {name for name in RULES if values[name] is None}
        for name, each in settings.items():
            if name not in derived:  # what follows from valid values is valid
                values[name] = each.read(values[name], "Config()")
        for name, rule in RULES.items():
            if name in derived:
                values[name] = rule.value(values)
        for name, value in _tables_of(values).items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "derived", self.derived | derived)
        for fault in _faults(self):
            raise ConfigError(fault)

    @classmethod
    def load(cls, path: str | Path | None, overrides: Sequence[str] = ()) -> Self:
        """Merge the defaults, the file at `path` (None: no file) and command-line `overrides`.

        The file is TOML, or the config.json of a run; the name of a preset stands for its file. Overrides are
        `--key value` or `--key=value`. Booleans are `true` or `false`, `--key` alone is true and `--no-key` is false. A
        list takes all values up to the next `--key`, may be given again to add more, and is empty if only `--key=` is
        given.
        """
        values = {} if path is None else read_file(Path(path))
        return cls._merge(values, parse(overrides, settings_of(Config)), str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, object], source: str = "the dictionary") -> Self:
        """The settings with `values`, which messages say are from `source`."""
        return cls._merge(values, {}, source)

    def to_dict(self) -> dict[str, Any]:
        """All settings as JSON-compatible values, and under "derived" the names of those that follow from others."""
        values: dict[str, Any] = {name: attrgetter(name)(self) for name in settings_of(Config)}
        for name, value in values.items():
            if isinstance(value, tuple | Recipe):
                values[name] = list(value) if isinstance(value, tuple) else value.to_dict()
        return nest(values) | {"derived": sorted(self.derived)}

    def replace(self, overrides: Sequence[str]) -> Self:
        """A copy with command-line `overrides` applied (in the form that `load` takes)."""
        return self.change(**parse(overrides, settings_of(Config)))

    def change(self, **values: Any) -> Self:
        """A copy with other `values`. A setting that was derived from one of them is derived again."""
        return self._merge(self.to_dict(), values, "Config.change()")

    @classmethod
    def _merge(cls, values: Mapping[str, Any], changes: Mapping[str, Any], source: str) -> Self:
        names = values.get("derived", [])
        if not isinstance(names, list) or not set(names) <= RULES.keys():
            raise ConfigError(f"derived in {source} must be a list of some of {', '.join(RULES)}; got {names!r}")
        settings = settings_of(Config)
        flat = flatten({key: value for key, value in values.items() if key != "derived"}, settings)
        stale: set[str] = set()  # the derived settings that follow, directly or not, from settings that change
        for name, rule in RULES.items():
            if name in names and name not in changes and {*changes, *stale} & {*rule.sources}:
                stale.add(name)
        given = {name: value for name, value in flat.items() if name not in stale}
        kept = {name: find_setting(name, settings, source).read(value, source) for name, value in given.items()}
        return cls(**_tables_of(kept | dict(changes)), derived=frozenset(names) - changes.keys())


def describe() -> list[tuple[str, str, object, str]]:
    """(name, type, default, help) of every setting, in the order of declaration; a derived default in words."""
    return [
        (name, TYPE_NAMES[each.kind], RULES[name].words if each.default is None else each.default, each.help)
        for name, each in settings_of(Config).items()
    ]


def _tables_of(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Config` from values by name: those of a table become its dataclass."""
    tables = {each.name: each.metadata["table"] for each in fields(Config) if "table" in each.metadata}
    return {name: tables[name](**value) if name in tables else value for name, value in nest(flat).items()}


# ---- Conditions on several settings: what is wrong, as messages, of which the first is raised.


def _faults(config: Config) -> Iterator[str]:
    names, built_in = ", ".join(BUILT_IN_MODELS), config.model in BUILT_IN_MODELS
    # A bare word that is no folder is a misspelt name. A path is left to who opens it: the settings of a finished
    # run must still be readable where its base model is not.
    if not built_in and "/" not in config.model and not Path(config.model).is_dir():
        hint = f", a preset: give it as in octavo train {config.model}" if config.model in PRESETS else ""
        yield f"model must be one of {names}, or a local Hugging Face folder; got {config.model!r}{hint}"
    recipe = delayed() if config.recipe == "delayed" else config.recipe
    if config.calibration and (built_in or not (isinstance(recipe, Recipe) and recipe.scales_by_history)):
        yield (
            "calibration gives the recipe delayed its first scales, to fine-tune the calibrated model; got recipe "
            f"{config.recipe} and model {config.model}: give --recipe delayed and the folder of the model"
        )
    if config.dropout and not built_in:
        yield (
            f"dropout is for the models {names}; the config.json of {config.model} says what dropout that model has: "
            "change it there"
        )
    if built_in:
        yield from _faults_of_heads(config)
    yield from _faults_of_experts(config)
    yield from _faults_of_schedule(config)
    if config.precision == "fp16" and (config.optimizer.weights == "bf16" or config.optimizer.offload):
        name = "weights = bf16" if config.optimizer.weights == "bf16" else "offload"
        yield f"optimizer.{name} requires precision bf16 or fp32, got fp16: choose bf16"


def _faults_of_heads(config: Config) -> Iterator[str]:
    width, heads, kv_heads, rope = config.width, config.heads, config.kv_heads, config.model != "gpt2"
    counts = [n for n in range(1, min(width, 1024) + 1) if width % n == 0 and not (rope and width // n % 2)]
    nearby = ", ".join(map(str, sorted(sorted(counts, key=lambda n: abs(n - heads))[:4])))
    advice = f"for this width, heads can be {nearby}" if nearby else "make the width even"
    if width % heads:
        yield f"heads must divide width; got heads {heads} and width {width}; {advice}"
    if rope and width // heads % 2:
        yield (
            f"the head dimension, width / heads, must be even (RoPE turns pairs of features); "
            f"got {width} / {heads} = {width // heads}; {advice}"
        )
    if rope and heads % kv_heads:
        fitting = ", ".join(str(n) for n in range(1, min(heads, 1024) + 1) if heads % n == 0)
        yield (
            f"kv_heads must divide heads; got kv_heads {kv_heads} and heads {heads}; for these heads, kv_heads can be "
            f"{fitting}"
        )


def _faults_of_experts(config: Config) -> Iterator[str]:
    experts = config.experts
    if config.model == "mixture" and experts.top_k > experts.count:
        counts = f"got experts.top_k {experts.top_k} and experts.count {experts.count}"
        yield f"experts.top_k must be at most experts.count; {counts}"
    for name, value in vars(experts).items():
        if config.model != "mixture" and value != getattr(ExpertSettings, name):
            yield (
                f"experts.{name} is a setting of the model mixture, and the model {config.model} has no experts that "
                f"it could change; got {value!r}: give --model mixture, or leave it out"
            )


def _faults_of_schedule(config: Config) -> Iterator[str]:
    if config.min_learning_rate > config.learning_rate:
        yield (
            f"min_learning_rate must be at most learning_rate; "
            f"got min_learning_rate {config.min_learning_rate} and learning_rate {config.learning_rate}"
        )
    steps = config.decay_steps
    name = "steps" if "decay_steps" in config.derived else "decay_steps"
    if config.warmup >= steps:
        yield f"warmup must be below {name}; got warmup {config.warmup} and {name} {steps}"
    if config.schedule == "wsd" and config.warmup > steps * (1 - config.decay):
        yield (
            f"warmup and decay must fit in the steps; got warmup {config.warmup} and "
            f"decay {config.decay} of {steps} {name} ({config.decay * steps:g})"
        )


# ---- The settings of a run in its config.json.


def read_settings(run: RunFolder) -> Config:
    """The settings of a run, whose folder may have been moved. An ArtifactError if the file is damaged."""
    return Config.from_dict(read_json(run.config) | {"out": str(run.path)}, source=str(run.config))


def write_settings(config: Config, run: RunFolder) -> None:
    """Replace the settings in the folder of a run."""
    replace_file(run.config, json.dumps(config.to_dict(), indent=2) + "\n")


# The vocabularies of the tokenizers that the presets name.
_KNOWN = dict.fromkeys(("Llama-3.2-1B", "Meta-Llama-3-8B", "Meta-Llama-3-70B"), 128256)


def known_vocabulary(config: Config) -> int | None:
    """The size of the vocabulary that the settings name, without training, downloading or importing a tokenizer.

    None if only a tokenizer tells that is not here, or that has no tokenizer.json.
    """
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
