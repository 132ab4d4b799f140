"""A training run is one frozen record of settings: `Config`.

A setting has its default, help and valid values on its line. A field that is another dataclass is a table, and its
settings are named TABLE.KEY, as parallel.tp.

Conditions on several settings are checked after them, in `__post_init__`, so every `Config` is valid. A setting with
the default None follows from others, and `change` derives it again when one of them changes.
"""

import difflib
import functools
import json
import math
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from octavo.checkpoint.files import replace_file
from octavo.checkpoint.folder import BUILT_IN_MODELS, RunFolder
from octavo.recipe import GEMMS, RECIPE_FILES, Recipe, get_recipe

RECIPE = str | Recipe
LIST = tuple[str, ...]
TYPE_NAMES: dict[Any, str] = {
    RECIPE: "a recipe's name, a .json or .toml file or its fields",
    str: "a string",
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    LIST: "a list of strings",
}

Range = tuple[str, Callable[[Any], bool]]
POSITIVE: Range = ("at least 1", lambda value: value >= 1)
NOT_NEGATIVE: Range = ("0 or more", lambda value: value >= 0)
NAMED: Range = ("a name that is not empty", lambda value: value != "")
DEGREE: Range = ("at least 1, or -1 for the processes that are left", lambda value: value >= 1 or value == -1)
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


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type or outside its valid values; the message names it."""


def setting(default: Any, help: str, valid: Range | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A field that is a setting. `choices` are all values of a setting that is a name."""
    if choices:
        valid = ("one of " + ", ".join(choices), choices.__contains__)
    return field(default=default, metadata={"help": help, "valid": valid})


@dataclass(frozen=True)
class Setting:
    """The declaration of a setting, which reads its values. The default None stands for a derived value."""

    name: str
    kind: Any
    default: Any
    help: str
    valid: Range | None

    def read(self, value: object, source: str) -> Any:
        """`value` in the setting's type; a ConfigError if it is of another type, or outside the valid values."""
        typed = self._typed(value, source)
        if self.valid is not None and not self.valid[1](typed):
            raise ConfigError(f"{self.name} must be {self.valid[0]}; got {typed!r}")
        if self.kind is int and typed >= 2**63:
            raise ConfigError(f"{self.name} must be below 2^63; got {typed!r}")
        return typed

    def _typed(self, value: object, source: str) -> Any:
        """The only conversions are int to float, list to tuple, file to recipe."""
        if self.kind == RECIPE and isinstance(value, str | Recipe | Mapping):
            try:
                value = Recipe.from_dict(value) if isinstance(value, Mapping) else value
                return get_recipe(value) if isinstance(value, str) and value.endswith(RECIPE_FILES) else value
            except ValueError as error:
                raise ConfigError(f"{self.name} in {source}: {error}") from error
        if self.kind is float and type(value) is int and abs(value) < 2**63:  # a float need not hold a larger one
            return float(value)
        if self.kind == LIST and isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
            return tuple(value)
        # type() and not isinstance(): a bool is an int in Python, but never here.
        if type(value) is not self.kind or (isinstance(value, float) and not math.isfinite(value)):
            hint = "; it is no table of settings" if isinstance(value, Mapping) else ""
            got = f"{value!r} ({type(value).__name__}){hint}"
            raise ConfigError(f"{self.name} in {source} must be {TYPE_NAMES[self.kind]}; got {got}")
        return value


@functools.cache
def settings_of(cls: Any, table: str = "") -> dict[str, Setting]:
    """The settings of a dataclass by name, in the order of declaration."""
    kinds = typing.get_type_hints(cls)
    found: dict[str, Setting] = {}
    for each in fields(cls):
        name = table + each.name
        if is_dataclass(each.default):
            found |= settings_of(kinds[each.name], f"{name}.")
        elif each.metadata:
            found[name] = Setting(name, kinds[each.name], each.default, **each.metadata)
    return found


def flatten(values: Mapping[str, Any], settings: Collection[str] = (), table: str = "") -> dict[str, Any]:
    """`values` with the entries of each table as TABLE.KEY. A mapping under the name of a setting stays as it is."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{table}{key}"
        is_table = isinstance(value, Mapping) and name not in settings
        flat |= flatten(value, settings, f"{name}.") if is_table else {name: value}
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`flat` with the entries TABLE.KEY in a dictionary for each table."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        table, dot, key = name.rpartition(".")
        (nested.setdefault(table, {}) if dot else nested)[key] = value
    return nested


@dataclass(frozen=True)
class Parallel:
    """The degrees by which the processes of `torchrun` share model and data. They multiply to their number."""

    dp_shard: int = setting(-1, "processes that share the weights of a replica (FSDP2); -1: those left", DEGREE)
    dp_replicate: int = setting(1, "replicas of the weights, each on other data (HSDP); -1: those left", DEGREE)
    tp: int = setting(1, "processes that share each layer (tensor parallel); -1: those left", DEGREE)
    fp8_all_gather: bool = setting(True, "gather the weights of FP8 layers in eight bits")
    gather_dtype: str = setting(
        "fp32",
        "fp32, or bf16: dtype of other weights in the forward pass; bf16 halves the traffic of these and of gradients, "
        "and rounds norms",
        choices=("fp32", "bf16"),
    )
    async_tp: bool = setting(False, "multiply while activations travel between the processes of tp")
    timeout: int = setting(600, "seconds that a process waits for the others before it fails", POSITIVE)


@dataclass(frozen=True)
class AttentionSettings:
    """The precision of the causal attention, forward and backward (`octavo.nn.use_fp8_attention`)."""

    precision: str = setting("bf16", "bf16, or fp8: long texts attend in E4M3 (extra cudnn)", choices=("bf16", "fp8"))
    shortest: int = setting(8192, "tokens of the shortest text whose attention runs in FP8", POSITIVE)


@dataclass(frozen=True)
class ExpertSettings:
    """The experts of a `mixture`: MLPs of `mlp_width`, of which each token runs through a few."""

    count: int = setting(8, "experts of a block (mixture)", POSITIVE)
    top_k: int = setting(2, "experts that a token runs through (mixture)", POSITIVE)
    shared_width: int = setting(0, "hidden features of an MLP that every token runs through (mixture)", NOT_NEGATIVE)
    balance: float = setting(0.01, "factor of the loss that spreads tokens over experts (mixture)", NOT_NEGATIVE)


LARGE_VOCABULARY = 32768  # "auto" takes chunks for this size and larger ones


@dataclass(frozen=True)
class LossSettings:
    """The computation of the loss from the inputs of the model's head (`octavo.train.loss`)."""

    logits: str = setting(
        "auto",
        "chunked: the logits of `chunk` tokens are in memory at a time; whole: all; auto: chunked if the vocabulary is "
        "32,768 or more",
        choices=("auto", "chunked", "whole"),
    )
    chunk: int = setting(4096, "tokens whose logits are in memory at a time (chunked)", POSITIVE)

    def is_chunked(self, vocabulary: int) -> bool:
        return self.logits == "chunked" or (self.logits == "auto" and vocabulary >= LARGE_VOCABULARY)


MOMENT_BLOCK = 256  # elements of a row of moments in eight bits that share a scale


@dataclass(frozen=True)
class OptimizerSettings:
    """The dtypes and the place of weights and moments. A dtype other than fp32 needs torchao: the extra `optim`."""

    weights: str = setting(
        "fp32", "dtype of the weights; bf16: a step rounds them stochastically", choices=("fp32", "bf16")
    )
    state: str = setting(
        "fp32", "dtype of AdamW's two moments; 8bit and fp8: a byte each, in blocks", choices=("fp32", "8bit", "fp8")
    )
    offload: bool = setting(
        False, "hold weights and moments in the CPU's memory, and update them there; the GPU has the weights of a block"
    )
    masters: str = setting(
        "device", "host: the CPU holds FP32 weights and moments, the GPU the bytes of FP8", choices=("device", "host")
    )

    @property
    def on_host(self) -> bool:
        return self.offload or self.masters == "host"

    @property
    def weight_bytes(self) -> float:
        return 2.0 if self.weights == "bf16" else 4.0

    @property
    def moment_bytes(self) -> float:
        """Bytes of both moments of a parameter; in eight bits with an FP32 scale for each block."""
        return 2 * (4.0 if self.state == "fp32" else 1 + 4 / MOMENT_BLOCK)


@dataclass(frozen=True)
class ActivationCheckpointing:
    """The mode of activation checkpointing, in which backward computes parts of a block again to save memory."""

    mode: str = setting(
        "none",
        "none; selective: gate and up are computed again, without a fused MLP every second GEMM; full: the whole block",
        choices=("none", "full", "selective"),
    )


@dataclass(frozen=True)
class Compile:
    """Settings of `torch.compile`."""

    blocks: bool = setting(False, "compile each block of the model with torch.compile")
    backend: str = setting("inductor", "backend of torch.compile", NAMED)


@dataclass(frozen=True)
class WatchSettings:
    """Settings of the watch of the layers (docs/watch.md), and of the reactions to faults (docs/warnings.md)."""

    interval: int = setting(100, "steps between samples of the layers; 0 does not watch them", NOT_NEGATIVE)
    rows: int = setting(64, "rows of each operand that a sample reads", POSITIVE)
    on_warning: str = setting(
        "log",
        "log; promote: the layer moves to BF16, or its gradients to e5m2; stop: save and end",
        choices=("log", "promote", "stop"),
    )
    on_spike: str = setting(
        "log", "log; rollback: return to the last checkpoint, and skip the batches since", choices=("log", "rollback")
    )
    rollbacks: int = setting(3, "the most rollbacks of a run", NOT_NEGATIVE)


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
        ("model", "lora"),
        lambda v: 1e-3 if v["model"] in BUILT_IN_MODELS else 2e-4 if v["lora"] else 2e-5,
        "1e-3; to fine-tune 2e-5, adapters 2e-4",
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
    experts: ExpertSettings = ExpertSettings()
    lora: int = setting(0, "rank of LoRA adapters around the frozen weights of a folder; 0 trains all", NOT_NEGATIVE)
    alpha: float = setting(0.0, "the factor of adapters is alpha / lora; 0: alpha is 2 * lora", NOT_NEGATIVE)
    targets: tuple[str, ...] = setting((), "layers with adapters, as q_proj; all linear layers if none is given")

    # FP8
    recipe: str | Recipe = setting("rowwise", "an FP8 recipe; auto: what this device runs best", NAMED)
    skip: tuple[str, ...] = setting((), "globs of the linear layers that stay in BF16")
    bf16_gemms: tuple[str, ...] = setting((), "GEMMs of every layer that stay in BF16: some of y, dx, dw", SOME_GEMMS)
    calibration: str = setting("", "folder of octavo calibrate, or packed as static: the first scales of delayed")
    only_if_faster: bool = setting(False, "leave in BF16 the layers that FP8 does not speed up on this GPU")
    emulate: bool = setting(False, "allow emulated GEMMs on a GPU that lacks the native one")
    attention: AttentionSettings = AttentionSettings()

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
    loss: LossSettings = LossSettings()
    optimizer: OptimizerSettings = OptimizerSettings()

    # Machine
    device: str = setting("auto", "auto, cpu, cuda or cuda:N", DEVICE)
    precision: str = setting("bf16", "precision of what is not FP8", choices=("bf16", "fp32", "fp16"))
    deterministic: bool = setting(False, "use deterministic algorithms only")
    compile: Compile = Compile()
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    parallel: Parallel = Parallel()

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
    watch: WatchSettings = WatchSettings()

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
        _check(self)

    @property
    def step_tokens(self) -> int:
        """Tokens that all processes read in a step."""
        return self.batch * self.accumulate * self.context

    def to_dict(self) -> dict[str, Any]:
        """All settings as JSON-compatible values, and under "derived" the names of those that follow from others."""
        values: dict[str, Any] = {name: attrgetter(name)(self) for name in settings_of(Config)}
        for name, value in values.items():
            if isinstance(value, tuple | Recipe):
                values[name] = list(value) if isinstance(value, tuple) else value.to_dict()
        return nest(values) | {"derived": sorted(self.derived)}

    def change(self, **values: Any) -> Self:
        """A copy with other `values`. A setting that was derived from one of them is derived again."""
        return self.from_dict(self.to_dict(), "Config.change()", values)

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], source: str = "the dictionary", changes: Mapping[str, Any] | None = None
    ) -> Self:
        """The settings with `values`, which messages say are from `source`, and then with `changes`, by name."""
        changes = changes or {}
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
        kept = {name: get_setting(name, source).read(value, source) for name, value in given.items()}
        return cls(**_tables_of(kept | dict(changes)), derived=frozenset(names) - changes.keys())


def _tables_of(flat: Mapping[str, Any]) -> dict[str, Any]:
    tables: dict[str, Any] = {each.name: type(each.default) for each in fields(Config) if is_dataclass(each.default)}
    return {name: tables[name](**value) if name in tables else value for name, value in nest(flat).items()}


def get_setting(key: str, source: str) -> Setting:
    """The setting `key`; a ConfigError with the nearest name if there is none."""
    settings = settings_of(Config)
    if key in settings:
        return settings[key]
    if of_table := ", ".join(repr(name) for name in settings if name.startswith(f"{key}.")):
        raise ConfigError(f"{key!r} in {source} is a table, not a setting: its settings are {of_table}")
    part = [name for name in settings if name in key.split("_") or key == "".join(word[0] for word in name.split("_"))]
    nearest = part + difflib.get_close_matches(key, list(settings), n=1, cutoff=0.6)
    advice = f"did you mean {nearest[0]!r}?" if nearest else "octavo train --settings lists all settings"
    raise ConfigError(f"unknown setting {key!r} in {source}; {advice}")


PRESETS = {path.stem: path for path in sorted((Path(__file__).parent / "presets").glob("*.toml"))}


# ---- Conditions on several settings, as rows: a setting, when it is refused, what it requires, what came, what to do.


Refusal = tuple[str, object, str, object, str]


def refuse(config: Config, *rows: Refusal) -> None:
    """Raise a ConfigError for the first of `rows` whose condition holds."""
    for name, holds, required, got, remedy in rows:
        if holds:
            raise ConfigError(f"{name} {attrgetter(name)(config)} requires {required}; got {got}: {remedy}")


BESIDE_HOST: dict[str, tuple[Any, ...]] = {  # what masters on the host take of other settings
    "precision": ("bf16", "fp32"),
    "optimizer.weights": ("fp32",),
    "optimizer.state": ("fp32",),
    "optimizer.offload": (False,),
    "lora": (0,),
}


def _check(config: Config) -> None:
    names, built_in = ", ".join(BUILT_IN_MODELS), config.model in BUILT_IN_MODELS
    # A bare word that is no folder is a misspelt name. A path is left to who opens it: the settings of a finished
    # run must still be readable where its base model is not.
    if not built_in and "/" not in config.model and not Path(config.model).is_dir():
        hint = f", a preset: give it as in octavo train {config.model}" if config.model in PRESETS else ""
        raise ConfigError(f"model must be one of {names}, or a local Hugging Face folder; got {config.model!r}{hint}")
    try:
        by_history = config.recipe != "auto" and get_recipe(config.recipe).scales_by_history
    except ValueError as error:
        raise ConfigError(str(error)) from error
    model, steps = f"model {config.model}", config.decay_steps
    of_steps = "steps" if "decay_steps" in config.derived else "decay_steps"
    idle = [name for name, value in vars(config.experts).items() if value != getattr(ExpertSettings, name)]
    refuse(
        config,
        ("calibration", config.calibration and (built_in or not by_history), "recipe delayed, to which it gives the "
         "first scales, and the calibrated model", f"recipe {config.recipe} and {model}",
         "give --recipe delayed and the folder of the model"),
        ("dropout", config.dropout and not built_in, f"one of the models {names}", model,
         "change the dropout in the config.json of that model"),
        *(_refusals_of_heads(config) if built_in else ()),
        ("experts.top_k", config.model == "mixture" and config.experts.top_k > config.experts.count,
         "as many experts", f"experts.count {config.experts.count}", "raise it, or lower experts.top_k"),
        *((f"experts.{name}", config.model != "mixture", "the model mixture", model,
           "give --model mixture, or leave it out") for name in idle),
        ("lora", config.lora and built_in, "the weights of a Hugging Face folder", model,
         "give --model FOLDER, or leave lora out"),
        *((name, config.lora and attrgetter(name)(config), "a run that trains all weights", f"lora {config.lora}",
           "leave one out") for name in ("calibration", "optimizer.offload")),
        *(("optimizer.masters", config.optimizer.masters == "host" and attrgetter(name)(config) not in taken,
           f"{name} {taken[0]}", attrgetter(name)(config), "leave one out") for name, taken in BESIDE_HOST.items()),
        ("min_learning_rate", config.min_learning_rate > config.learning_rate, "a learning_rate as large",
         f"learning_rate {config.learning_rate}", "lower it"),
        ("warmup", config.warmup >= steps, f"more {of_steps}", f"{of_steps} {steps}", "lower it"),
        ("warmup", config.schedule == "wsd" and config.warmup > steps * (1 - config.decay), "room before the decay",
         f"decay {config.decay} of {steps} {of_steps} ({config.decay * steps:g})", "lower one of the two"),
        *((name, config.precision == "fp16" and attrgetter(name)(config) not in ("fp32", False),
           "precision bf16 or fp32", "fp16", "choose bf16") for name in ("optimizer.weights", "optimizer.offload")),
    )  # fmt: skip


def _refusals_of_heads(config: Config) -> Iterator[Refusal]:
    width, heads, rope = config.width, config.heads, config.model != "gpt2"
    counts = [n for n in range(1, min(width, 1024) + 1) if width % n == 0 and not (rope and width // n % 2)]
    nearby = ", ".join(map(str, sorted(sorted(counts, key=lambda n: abs(n - heads))[:4])))
    advice = f"for this width, heads can be {nearby}" if nearby else "make the width even"
    fitting = ", ".join(str(n) for n in range(1, min(heads, 1024) + 1) if heads % n == 0)
    yield "heads", width % heads, "a width that is a multiple of it", f"width {width}", advice
    yield (
        "heads", rope and width // heads % 2, "an even head dimension, width / heads (RoPE turns pairs of features)",
        f"{width} / {heads} = {width // heads}", advice,
    )  # fmt: skip
    yield (
        "kv_heads", rope and heads % config.kv_heads, "heads that are a multiple of it", f"heads {heads}",
        f"for these heads, kv_heads can be {fitting}",
    )  # fmt: skip


SIZES = ("layers", "width", "heads", "kv_heads", "mlp_width", "tied", "rope_theta")  # of a built-in model


def check_effects(config: Config, processes: int, tp: int, shares: int, given: Collection[str]) -> None:
    """Raise a ConfigError if a setting among `given` that is not the default has no effect. The run has so many
    processes, of which `tp` share each layer, and its batch is divided into `shares`."""
    tokens, built_in, model = config.batch // shares * config.context, config.model in BUILT_IN_MODELS, config.model
    wide = config.recipe != "auto" and not get_recipe(config.recipe).quantized
    idle = (
        *((name, not built_in, "a model from random weights", f"model {model}", "give --model llama")
          for name in (*SIZES, "tokenizer")),
        ("vocabulary", config.tokenizer != "bpe" and (config.tokenizer, config.vocabulary) != ("bytes", 256),
         "tokenizer bpe", f"tokenizer {config.tokenizer}", "give --tokenizer bpe"),
        ("bias", model != "gpt2", "the model gpt2", f"model {model}", "give --model gpt2"),
        ("disturb", not config.branch, "a branch", "none", "give --branch RUN/step-N"),
        ("watch.rows", not config.watch.interval, "watch.interval above 0", "0", "give --watch.interval 100"),
        ("watch.rollbacks", config.watch.on_spike == "log", "watch.on_spike rollback", "log",
         "give --watch.on-spike rollback"),
        ("attention.shortest", config.attention.precision == "bf16", "attention.precision fp8", "bf16",
         "give --attention.precision fp8"),
        *((name, model == "gpt2", "the model llama or mixture", "model gpt2", "give --model llama")
          for name in ("kv_heads", "mlp_width", "rope_theta")),
        ("bf16_gemms", wide, "a recipe with GEMMs in FP8", f"recipe {config.recipe}", "give --recipe rowwise"),
        ("decay", config.schedule == "cosine", "schedule wsd", "schedule cosine", "give --schedule wsd"),
        ("loss.chunk", config.loss.chunk > tokens, f"{config.loss.chunk} tokens in a micro-batch of a process",
         f"{tokens}", f"give at most {tokens}"),
        ("loss.chunk", config.loss.logits == "whole", "logits in chunks", "loss.logits whole", "give auto or chunked"),
        ("compile.backend", not config.compile.blocks, "compile.blocks", "false", "give --compile.blocks"),
        *((name, not config.lora, "adapters", "lora 0", "give a rank, as --lora 16") for name in ("alpha", "targets")),
        ("parallel.gather_dtype", processes == 1, "several processes", "1", "start them with torchrun"),
        ("parallel.async_tp", tp == 1, "parallel.tp above 1", f"{tp}", "give --parallel.tp 2"),
    )  # fmt: skip
    for name, without_effect, required, got, remedy in idle:
        own = name in given and name not in config.derived
        changed = own and attrgetter(name)(config) != settings_of(Config)[name].default
        refuse(config, (name, without_effect and changed, required, got, f"{remedy}, or leave {name} out"))


def write_settings(config: Config, run: RunFolder) -> None:
    """Replace the settings in the folder of a run."""
    replace_file(run.config, json.dumps(config.to_dict(), indent=2) + "\n")
