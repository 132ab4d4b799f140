"""Settings: fields of frozen dataclasses, read from a command line, a TOML file or config.json.

A setting has its default, help and valid values on its line. A field that is another such dataclass is a table, and its
settings are named TABLE.KEY:

    a file           [parallel]
                     tp = 2
    a command line   --parallel.tp 2
    code             config.parallel.tp
"""

import difflib
import functools
import math
import re
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from octavo.recipe import RECIPE_FILES, Recipe, get_recipe
from octavo.util import hub_hint, parse_object

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
# How the command line spells a number.
NUMBERS = {int: r"[+-]?[0-9]+", float: r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"}
WORDS = "the command line"

Range = tuple[str, Callable[[Any], bool]]
POSITIVE: Range = ("at least 1", lambda value: value >= 1)
NOT_NEGATIVE: Range = ("0 or more", lambda value: value >= 0)
NAMED: Range = ("a name that is not empty", lambda value: value != "")
DEGREE: Range = ("at least 1, or -1 for the processes that are left", lambda value: value >= 1 or value == -1)


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type or outside its valid values; the message names it."""


def setting(default: Any, help: str, valid: Range | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A field that is a setting. `choices` are all values of a setting that is a name."""
    if choices:
        valid = ("one of " + ", ".join(choices), choices.__contains__)
    return field(default=default, metadata={"help": help, "valid": valid})


def table(kind: type) -> Any:
    """A field that is a table: its settings are the fields of the dataclass `kind`."""
    return field(default=kind(), metadata={"table": kind})


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

    def parse(self, words: list[str]) -> Any:
        """The value that `words` of the command line spell; no words are true."""
        if not words and self.kind is not bool:
            raise ConfigError(f"{self.option} needs a value ({TYPE_NAMES[self.kind]})")
        if self.kind == LIST:
            return tuple(word for word in words if word)
        if len(words) > 1:
            raise ConfigError(f"{self.option} takes one value; got {' '.join(words)}")
        value: Any = words[0] if words else "true"
        if self.kind in NUMBERS and re.fullmatch(NUMBERS[self.kind], value):
            value = self.kind(value)
        elif self.kind is bool:
            value = {"true": True, "false": False}.get(value, value)
        return self.read(value, WORDS)

    @property
    def option(self) -> str:
        return f"--{self.name.replace('_', '-')}"


@functools.cache
def settings_of(cls: Any, table: str = "") -> dict[str, Setting]:
    """The settings of a dataclass by name, in the order of declaration."""
    kinds = typing.get_type_hints(cls)
    found: dict[str, Setting] = {}
    for each in fields(cls):
        name = table + each.name
        if kind := each.metadata.get("table"):
            found |= settings_of(kind, f"{name}.")
        elif each.metadata:
            found[name] = Setting(name, kinds[each.name], each.default, **each.metadata)
    return found


def flatten(values: Mapping[str, Any], settings: Collection[str] = ()) -> dict[str, Any]:
    """`values` with the entries of each table as TABLE.KEY. A mapping under the name of a setting stays as it is."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and key not in settings:
            flat |= {f"{key}.{inner}": entry for inner, entry in value.items()}
        else:
            flat[key] = value
    return flat


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`flat` with the entries TABLE.KEY in a dictionary for each table."""
    nested: dict[str, Any] = {}
    for name, value in flat.items():
        table, dot, key = name.rpartition(".")
        (nested.setdefault(table, {}) if dot else nested)[key] = value
    return nested


# ---- Reading. A ConfigError names the source.


PRESETS = {path.stem: path for path in sorted((Path(__file__).parent / "presets").glob("*.toml"))}


def find_setting(key: str, settings: Mapping[str, Setting], source: str) -> Setting:
    """The setting `key`; a ConfigError with the nearest name if there is none."""
    if key in settings:
        return settings[key]
    if of_table := ", ".join(repr(name) for name in settings if name.startswith(f"{key}.")):
        raise ConfigError(f"{key!r} in {source} is a table, not a setting: its settings are {of_table}")
    nearest = difflib.get_close_matches(key, list(settings), n=1, cutoff=0.6)
    advice = f"did you mean {nearest[0]!r}?" if nearest else "octavo train --settings lists all settings"
    raise ConfigError(f"unknown setting {key!r} in {source}; {advice}")


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


def parse(overrides: Sequence[str], settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Command-line words to typed values by name; `--flag` alone is true and `--no-flag` is false."""
    groups: list[tuple[Setting, list[str]]] = []
    for word in overrides:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            off = settings.get(name.removeprefix("no_")) if name.startswith("no_") and not equals else None
            if off is not None and off.kind is bool:
                groups.append((off, ["false"]))
            else:
                groups.append((find_setting(name, settings, WORDS), [value] if equals else []))
        elif not groups:
            raise ConfigError(f"the command line must give settings as --key value; got {word!r}")
        elif not word and groups[-1][0].kind == LIST:
            option = groups[-1][0].option
            raise ConfigError(f"{option} has an empty value: give {option}= for an empty list")
        else:
            groups[-1][1].append(word)
    values: dict[str, Any] = {}
    for each, words in groups:
        value = each.parse(words)
        if each.name in values and each.kind != LIST:
            raise ConfigError(f"{each.option} must be given once; got it more than once")
        values[each.name] = values.get(each.name, ()) + value if each.kind == LIST else value
    return values


# ---- The tables.


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
    chunk: int = setting(1024, "tokens whose logits are in memory at a time (chunked)", POSITIVE)

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
        "none; full: a block saves its input only; selective: also its attention and every second GEMM",
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


# ---- What follows from a table alone: how the processes of a run form a mesh, and what FSDP2 gathers at once.
#
# The processes form an array [dp_replicate, dp_shard, tp], in the order of their ranks. Those that differ in `tp` only
# work on the same sequences, and on parts of each layer. All others have their own share of each batch.


SMALL = 1 << 27  # parameters: more than a block of a model of a billion has, less than one of Llama-3-8B


@dataclass(frozen=True)
class Degrees:
    """The sizes of the mesh, in the order of its dimensions."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def data(self) -> int:
        """The processes, or groups of processes, that work on different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def processes(self) -> int:
        return self.data * self.tp

    def share(self, rank: int) -> tuple[int, int]:
        """(index, count): which of `count` equal shares of a batch belongs to a rank."""
        return rank // self.tp, self.data


def find_degrees(parallel: Parallel, processes: int) -> Degrees:
    """The degrees of `parallel`, with the number of processes that are left in place of -1."""
    asked = {each.name: int(getattr(parallel, each.name)) for each in fields(Degrees)}
    open_names = [name for name, degree in asked.items() if degree == -1]
    if len(open_names) > 1:
        raise ConfigError(
            "only one degree of parallel can be -1, the processes that are left; got -1 for "
            f"{' and '.join(open_names)}: set all but one to a number, such as 1"
        )
    left = max(processes // math.prod(max(degree, 1) for degree in asked.values()), 1)
    asked |= dict.fromkeys(open_names, left)
    found = Degrees(**asked)
    if found.processes != processes:
        wanted = " x ".join(f"{name} {degree}" for name, degree in asked.items())
        raise ConfigError(
            f"the degrees of parallel must multiply to the number of processes, {processes}; got {wanted}, which is "
            f"{found.processes}: start {found.processes} processes with torchrun (octavo plan: --gpus "
            f"{found.processes}), or change parallel"
        )
    return found


def unit_size(parameters: int) -> int:
    """The blocks, of so many parameters each, in a unit of FSDP2: two if they are small together, else one.

    The hooks and collectives of a unit take about as long as the host's other work of a small block.
    """
    return 2 if 2 * parameters <= SMALL else 1
