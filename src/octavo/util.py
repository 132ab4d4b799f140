"""Helpers of every package: words of messages, tables, files of the user, extras, devices and progress."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import math
import os
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    import torch

# ---- Words of messages, and where they are printed.


# Control characters but tabs and ends of lines, and surrogates, which stand for bytes that are no text.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(text: str) -> str:
    """`text` with U+FFFD for what a terminal would obey: names in files, and the text of a model, are a stranger's."""
    return _OBEYED.sub("\N{REPLACEMENT CHARACTER}", text)


def discard_output(stream: IO[str]) -> None:
    """Send the buffered text of `stream` to the null device: Python flushes it once more when the program ends."""
    with suppress(OSError, ValueError):  # a stream without a file descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def plural(count: int, noun: str) -> str:
    """`count` with its noun in the right number: "1 linear layer", "2 linear layers"."""
    return f"{count} {noun if count == 1 else noun + 's'}"


def number(value: float | None, form: str, unit: float = 1.0) -> str:
    """A number by its unit, in a form such as ".2f"; "" for None."""
    return "" if value is None else format(value / unit, form)


def percent(share: float) -> str:
    """A share of 0 to 1 in percent: "7.1 %"."""
    return f"{100 * share:.1f} %"


def nearest(name: str, known: Iterable[str]) -> str:
    """A question for the end of "unknown ...": whether one of `known`, with a name much like `name`, was meant."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""


def some_of(names: Sequence[str], most: int = 3) -> str:
    """The first names, and the number of the others: "q, k, v and 1 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class Table(NamedTuple):
    """A table of text; columns in `right` hold numbers, those in `prose` sentences. A remark stands below it."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    right: tuple[str, ...] = ()
    prose: tuple[str, ...] = ()
    remark: str = ""

    def __str__(self) -> str:
        """The table without the remark, its columns aligned by blanks."""
        columns = []
        for cells in zip(self.columns, *self.rows, strict=True):
            width, align = max(map(len, cells)), str.rjust if cells[0] in self.right else str.ljust
            columns.append([align(cell, width) for cell in cells])
        return "\n".join([self.title, *("  ".join(row).rstrip() for row in zip(*columns, strict=True))])


def finite(value: Any) -> Any:
    """The value for JSON, which has no inf and no NaN: None in their place, also within dictionaries and lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


# ---- Reading files of the user: whatever a file makes its parser raise becomes one error, which names the file.


_LONGEST = 300  # characters of another program's error
_KINDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}
_KINDS |= {dict: "an object", NoneType: "null"}
T = TypeVar("T")


@contextmanager
def reading(where: str | PathLike[str], required: str, error: type[ValueError] = ValueError) -> Iterator[None]:
    """Turn what the block raises into an `error` which says that `where` is not `required`, such as "a tokenizer that
    the package tokenizers opens". An error that names `where` is raised as it is, and so is a lack of a package or of
    memory."""
    try:
        yield
    except BaseException as fault:
        named = re.search(rf"(?<!\w){re.escape(str(where))}(?!\w)", str(fault))
        if not of_input(fault) or isinstance(fault, ImportError | MemoryError) or named:
            raise
        raise error(f"{where} is not {required} ({_reason(fault)})") from fault


def of_input(fault: BaseException) -> bool:
    """True if the input can have raised this: what pyo3 raises where Rust panics is no Exception."""
    return isinstance(fault, Exception) or type(fault).__name__ == "PanicException"


def _reason(fault: BaseException) -> str:
    """One line of bounded length."""
    if isinstance(fault, RecursionError):
        return "it is nested too deeply"
    text = " ".join(str(getattr(fault, "strerror", None) or fault).split())[:_LONGEST]
    return text if isinstance(fault, ValueError | OSError) else f"{type(fault).__name__}: {text}".removesuffix(": ")


def parse_object(
    text: str | bytes, where: str, error: type[ValueError] = ValueError, *, toml: bool = False
) -> dict[str, Any]:
    """The object that a text in JSON or TOML holds, else an `error` that begins with `where`. Bytes may begin with the
    byte order mark of Windows' editors."""
    with reading(where, f"valid {'TOML' if toml else 'JSON'}", error):
        if toml:
            return tomllib.loads(text if isinstance(text, str) else text.decode("utf-8-sig"))
        found = json.loads(text)
    if not isinstance(found, dict):
        raise error(f"{where} must hold a JSON object, got {type(found).__name__}")
    return found


def build(cls: type[T], fields: Mapping[str, Any]) -> T:
    """The dataclass of a JSON object. A TypeError if a field is missing or unknown; the ValueError of `check_kinds`."""
    made = cls(**fields)
    check_kinds(vars(made), get_type_hints(cls))
    return made


def check_kinds(
    found: Mapping[str, Any], kinds: Mapping[str, Any], where: str = "", error: type[Exception] = ValueError
) -> None:
    """Raise an `error`, which begins with `where`, unless each of `kinds` has a value of its kind in `found`. A kind is
    a type, `dict[str, KIND]` or `KIND | None`. An int is a float too, and a bool is neither."""
    for key, kind in kinds.items():
        if not _fits(found.get(key), kind):
            any_of = get_args(kind) if isinstance(kind, UnionType) else (get_origin(kind) or kind,)
            shown = " or ".join(_KINDS.get(each, str(each)) for each in any_of)
            raise error(f"{where}{key} must be {shown}, got {found.get(key)!r}")


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if isinstance(kind, UnionType):
        return any(_fits(value, each) for each in get_args(kind))
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, get_args(kind)[1]) for each in value.values())
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, origin or kind)


# ---- Packages that only some commands need. Octavo names each in an extra of its own (`pyproject.toml`).


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Import `module`, which the extra `extra` of Octavo installs. An ImportError says how to install it in the source
    folder of Octavo; its `purpose` is a clause, such as "text is read through transformers"."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'{purpose}, and {module} cannot be imported ({error}): run pip install ".[{extra}]" in the source folder '
            "of Octavo"
        ) from error


def open_local(auto: Any, folder: str | Path, **settings: Any) -> Any:
    """`auto.from_pretrained(folder, **settings)`, where `auto` is a class of transformers such as `AutoTokenizer`.
    Nothing is downloaded, and no code of the folder is run; a model takes `config=open_config(folder)`. Raises a
    ValueError if the class cannot read the folder, or needs the Python code that its `auto_map` names."""
    try:
        with reading(folder, f"a folder that transformers' {auto.__name__} opens"):
            return auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **settings)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{folder} needs Python code of its own (auto_map in its config.json or tokenizer_config.json), and octavo "
            "runs no code of a model folder. Use a model that transformers implements itself"
        ) from error


def open_config(folder: str | Path) -> Any:
    """The configuration of a local model folder, as transformers reads it. It chooses no code: the name of an attention
    can be a repository of the hub, whose kernels transformers would fetch. Raises the errors of `open_local`."""
    transformers = import_extra("transformers", "hf", f"{folder} is a Hugging Face folder, which transformers opens")
    described = open_local(transformers.AutoConfig, folder)
    described._attn_implementation = described._experts_implementation = None  # in its parts too
    return described


def cache_argument() -> str:
    """What transformers calls the keys and values that a forward pass takes and returns: "cache", and before 5.24
    "past_key_values"."""
    masking = importlib.import_module("transformers.masking_utils")
    return "cache" if "cache" in inspect.signature(masking.create_causal_mask).parameters else "past_key_values"


def hub_hint(folder: str | Path) -> str:
    """The command that downloads a model if a missing `folder` has a name as on Hugging Face's hub, ORG/NAME; or ""."""
    org, _, name = str(folder).partition("/")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(folder)) or Path(org).exists():
        return ""
    return f". For a model of Hugging Face's hub: hf download {folder} --local-dir models/{name}"


def installed(package: str) -> str:
    """The version of a package; "" where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def output_of(*words: str) -> str:
    """The standard output of a program; "" if it is not installed or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


# ---- Choosing the device of a command or a function.


def choose_device(device: str | torch.device) -> torch.device:
    """The device of a name that PyTorch knows, or of "auto": the GPU where there is one, else the CPU. Raises a
    ValueError if no device has this name, or if it is a GPU that PyTorch does not see here."""
    import torch  # here: the command line loads this module before it knows that it needs PyTorch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}") from error
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if chosen.type == "cuda" and (chosen.index or 0) >= seen:
        last, none = f"cuda:{seen - 1}", f"this torch ({torch.__version__}) sees no GPU: use cpu"
        there = f"the GPUs that torch sees end with {last}: use {last}" if seen else none
        raise ValueError(f"device {device} was asked for, but {there}")
    return chosen


Progress = Callable[[int, int, str], None]
"""progress(done, total, doing): `done` of `total` pieces are done of the work that `doing` names, such as "packing"."""


def no_progress(done: int, total: int, doing: str) -> None:
    """Report to nobody."""
