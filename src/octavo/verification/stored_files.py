"""The files of a packed folder, read with the safetensors library and with no code of Octavo that packs.

An error in a file is added to `CheckpointFiles.findings`; it raises no exception, so that damaged folders can be
described.
"""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OF_TORCHAO = re.compile(r"\._weight_(qdata|scale)$")  # the parts of a Float8Tensor, for weight and weight_scale
_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True)
class Finding:
    """An error in the folder, a reader that disagrees with it, or a budget that it exceeds."""

    kind: str  # file, pickle, config, tensor, scale, weights, reader or budget
    where: str  # a tensor, module, file, reader or measure
    message: str  # what was required, and what was found

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass
class CheckpointFiles:
    """The tensors of a folder, and the errors in its files."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)  # config.json, or {}
    dtypes: dict[str, str] = field(default_factory=dict)  # as safetensors spells them: F8_E4M3, BF16, ...
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)  # unusual things that only some readers reject
    folded: bool = False  # something was folded into the weights, which then differ from MODEL's
    record: dict[str, Any] = field(default_factory=dict)  # octavo.json, or {}
    by_octavo: set[str] = field(default_factory=set)  # the tensors in files that Octavo wrote, as their headers say
    changed: list[str] = field(default_factory=list)  # tensors that Octavo wrote and another program has changed since
    _places: dict[str, tuple[Path, str]] = field(default_factory=dict)  # the file of a tensor, and its name there
    _opened: dict[Path, Any] = field(default_factory=dict)  # the file read last

    def get(self, name: str) -> Tensor:
        """Read one tensor to the CPU, in its stored dtype. It is not to be changed: the file read last stays open."""
        path, stored = self._places[name]
        if path not in self._opened:
            self._opened = {path: safe_open(path, framework="pt")}
        return self._opened[path].get_tensor(stored)

    def recorded(self, key: str) -> dict[str, Any]:
        """The object `key` of octavo.json; {} if there is none."""
        found = self.record.get(key)
        return found if isinstance(found, dict) else {}

    def add_finding(self, kind: str, where: str, message: str) -> None:
        self.findings.append(Finding(kind, where, message))

    @property
    def settings(self) -> Any:
        """The quantization_config of config.json, of whatever type it is; None if there is none."""
        return self.config.get("quantization_config")

    def nbytes(self, name: str) -> int:
        """The bytes that a tensor takes in its file."""
        return math.prod(self.shapes[name]) * _WIDTHS.get(self.dtypes[name], 1)


def read_files(folder: Path) -> CheckpointFiles:
    """Read the settings and the headers of the safetensors files of `folder`. A pickle is a finding, and not opened."""
    files = CheckpointFiles(folder)
    files.config = _read_json(files, "config.json")
    if files.config:
        _find_settings(files)
    elif not (folder / "config.json").is_file():
        files.add_finding("file", "config.json", "is missing")
    files.record = _read_json(files, "octavo.json")
    for path in sorted(p for p in folder.rglob("*") if p.suffix in PICKLES):
        name = str(path.relative_to(folder))
        files.add_finding("pickle", name, "is a pickle, which can run code, and was not opened: move it elsewhere")
    named = _tensor_files(files)
    for name, tensors in named.items():
        _read_header(files, name, tensors)
    for name in sorted({path.name for path in folder.glob("*.safetensors")} - named.keys()):
        files.remarks.append(f"{name} is not of the model, and vLLM reads it without an index: move it elsewhere")
    return files


def _find_settings(files: CheckpointFiles) -> None:
    """Put the settings of older writers, which are in other places, into `quantization_config`."""
    older = files.config.get("compression_config")
    if files.settings is None and isinstance(older, dict):
        files.config["quantization_config"] = {"quant_method": "compressed-tensors"} | older
        files.remarks.append("config.json has compression_config, the older name of quantization_config")
    settings = _read_json(files, "hf_quant_config.json") if files.settings is None else files.settings
    modelopt = settings.get("quantization") if isinstance(settings, dict) else None
    if isinstance(modelopt, dict):
        files.config["quantization_config"] = {"quant_method": "modelopt"} | modelopt


def _read_json(files: CheckpointFiles, name: str) -> dict[str, Any]:
    path = files.folder / name
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        files.add_finding("file", name, f"is not valid JSON ({error})")
        return {}
    if isinstance(content, dict):
        return content
    files.add_finding("file", name, f"must hold a JSON object, it holds {type(content).__name__}")
    return {}


def _tensor_files(files: CheckpointFiles) -> Mapping[str, set[str] | None]:
    """The safetensors files, each with the tensors that the index lists for it; None if there is no index."""
    placed = _read_json(files, _INDEX).get("weight_map")
    if (files.folder / _SINGLE).is_file():
        if isinstance(placed, dict) and _SINGLE not in placed.values():
            message = f"does not name {_SINGLE}, beside which vLLM reads what it names: move it elsewhere"
            files.add_finding("file", _INDEX, message)
        return {_SINGLE: None}
    if not (files.folder / _INDEX).is_file():
        files.add_finding("file", _SINGLE, f"is missing, and so is {_INDEX}: the folder has no tensors")
        return {}
    if not isinstance(placed, dict) or not placed or not all(isinstance(name, str) for name in placed.values()):
        files.add_finding("file", _INDEX, "must map the name of each tensor to a file in weight_map")
        return {}
    by_file: dict[str, set[str]] = defaultdict(set)
    for tensor, name in placed.items():
        by_file[name].add(tensor)
    for name in sorted(by_file):
        wrong = "outside of the folder" if "/" in name or "\\" in name or name in ("", ".", "..") else ""
        if wrong or not name.endswith(".safetensors"):
            why = wrong or "not a safetensors file"
            files.add_finding("file", _INDEX, f"names the file {name!r}, which is {why}: not opened")
            del by_file[name]
    return dict(sorted(by_file.items()))


def _read_header(files: CheckpointFiles, name: str, listed: set[str] | None) -> None:
    path = files.folder / name
    if not path.is_file():
        files.add_finding("file", name, f"is missing, and {_INDEX} names it")
        return
    try:
        with safe_open(path, framework="pt") as file:
            by_octavo = "octavo_version" in (file.metadata() or {})
            slices = {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118, it is no mapping
            headers = {tensor: (part.get_dtype(), tuple(part.get_shape())) for tensor, part in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        files.add_finding("file", name, f"is truncated or not a safetensors file ({error})")
        return
    for stored, (dtype, shape) in headers.items():
        tensor = _OF_TORCHAO.sub(lambda match: ".weight_scale" if match[1] == "scale" else ".weight", stored)
        if tensor in files._places:
            files.add_finding("tensor", tensor, f"is in two files, {files._places[tensor][0].name} and {name}")
        files._places[tensor], files.dtypes[tensor], files.shapes[tensor] = (path, stored), dtype, shape
        files.by_octavo |= {tensor} if by_octavo else set()
    listed = set(headers) if listed is None else listed
    for tensor in sorted(listed - headers.keys()):
        files.add_finding("tensor", tensor, f"is missing in {name}, where {_INDEX} places it")
    for tensor in sorted(headers.keys() - listed):
        files.add_finding("tensor", tensor, f"is in {name}, and {_INDEX} does not list it: readers would miss it")


# ---- What a packed folder says about its model and its tokens, against what MODEL says.
#
# Packing changes no number of config.json, no id of a token and no setting of generation. Other programs write these
# files again, with the defaults of transformers filled in, so values are compared and not bytes.


# Packing may change these, and untie a head, or they say who wrote a file.
_LEGAL = (
    "quantization_config", "compression_config", "dtype", "torch_dtype", "transformers_version", "auto_map",
    "name_or_path", "_name_or_path", "use_cache", "tie_word_embeddings", "_from_model_config", "image_processor_type",
    "feature_extractor_type", "processor_class",
)  # fmt: skip
_SETTINGS = ("generation_config.json", "preprocessor_config.json")
_TEXT = {
    "tokenizer.json": ("normalizer", "pre_tokenizer", "post_processor"),
    "tokenizer_config.json": ("add_bos_token", "add_eos_token", "chat_template"),
}  # fmt: skip
_TOKENS = (
    "tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip


def check_description(
    files: CheckpointFiles, config: Mapping[str, Any], model_config: Mapping[str, Any], model: Path
) -> None:
    """Add what differs from MODEL, in the folder `model`, to `files.findings`. `config` and `model_config` are the
    config.json of both as transformers completes them."""
    # Some programs keep the ids of special tokens in generation_config.json alone.
    elsewhere = _read_json(files, "generation_config.json").keys() - files.config.keys()
    moved = {key for key in elsewhere if key.endswith("_token_id")}
    lost = [key for key in model_config.keys() - config.keys() - moved if key.endswith("_token_id")]
    files.remarks += [f"config.json lacks {key}, which MODEL has" for key in sorted(lost)]
    if config.get("tie_word_embeddings") and not model_config.get("tie_word_embeddings"):
        files.add_finding("config", "config.json", "tie_word_embeddings is True, and MODEL has a head of its own")
    for key, ours, theirs in _differences(config, {k: v for k, v in model_config.items() if k not in moved}):
        message = f"{key} is {ours!r}, MODEL has {theirs!r}: the folder computes another function"
        files.add_finding("config", "config.json", message)
    for name in (*_SETTINGS, *_TOKENS):
        here, there = files.folder / name, model / name
        if not here.is_file() and there.is_file():
            files.remarks.append(f"MODEL has {name}, and the folder lacks it")
        elif here.is_file() and there.is_file() and here.read_bytes() != there.read_bytes():
            _compare(files, name, _content(here), _content(there))
    theirs = _reads_text(model)
    wrong = [key for key, value in _reads_text(files.folder).items() if theirs.get(key, value) != value]
    files.remarks += [f"the {key} of the tokenizer is not MODEL's: text may become other tokens" for key in wrong]


def _reads_text(folder: Path) -> dict[str, Any]:
    """What a tokenizer does to text beside its ids, and the chat template; {} without a tokenizer that can be read."""
    found: dict[str, Any] = {}
    for name, keys in _TEXT.items():
        with suppress(ValueError, RecursionError, OSError, AttributeError):
            content = json.loads((folder / name).read_bytes())
            found |= {key: content.get(key) for key in keys}
    if (template := folder / "chat_template.jinja").is_file():
        found["chat_template"] = template.read_text(encoding="utf-8", errors="replace")
    return found


def _compare(files: CheckpointFiles, name: str, ours: Any, theirs: Any) -> None:
    if ours is None or theirs is None:
        files.add_finding("file", name, "differs from MODEL's, and one of them cannot be read")
    elif name in _SETTINGS:
        for key, here, there in _differences(ours, theirs):
            files.add_finding("config", name, f"{key} is {here!r}, MODEL has {there!r}")
        files.remarks += [f"{name} lacks {key}, which MODEL has" for key in sorted({*theirs} - {*ours, *_LEGAL})]
    elif isinstance(ours, dict) and isinstance(theirs, dict):
        if wrong := [key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key)]:
            message = f"{len(wrong)} entries are not MODEL's, such as {wrong[0]!r}: the same text becomes other tokens"
            files.add_finding("config", name, message)
    elif ours != theirs:
        files.add_finding("config", name, "is not MODEL's: the same text becomes other tokens")


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The keys that both have with other values, as (key, ours, theirs); of kinds of layers that both mean."""
    for key, value in ((key, value) for key, value in ours.items() if key not in _LEGAL):
        other = theirs.get(key, value)
        if key == "layer_types" and key not in theirs and isinstance(value, list):  # caches read it of every class
            other = ["sliding_attention" if theirs.get("sliding_window") else "full_attention"] * len(value)
        if isinstance(value, Mapping) and isinstance(other, Mapping):
            yield from _differences(value, other, f"{path}{key}.")
        elif value != other:
            yield f"{path}{key}", value, other


def _content(path: Path) -> Any:
    """A JSON object (of tokenizer.json ids and merges), the lines of a text, or else bytes. None if it is not read."""
    content = path.read_bytes()
    try:
        if path.suffix == ".json":
            found = json.loads(content)
            return _tokens(found) if path.name == "tokenizer.json" else found if isinstance(found, dict) else None
        return [line for line in content.decode().splitlines() if line[:1] != "#"] if path.suffix == ".txt" else content
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return None


def _tokens(found: Any) -> dict[Any, Any]:
    """The id of each token in a tokenizer.json, and its merges by their rank."""
    vocabulary: Any = found["model"]["vocab"]
    if isinstance(vocabulary, list):  # of pairs (token, score)
        vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
    added = {token["content"]: token["id"] for token in found.get("added_tokens") or ()}
    merges = found["model"].get("merges") or ()
    ranks = {("merge", i): merge if isinstance(merge, str) else " ".join(merge) for i, merge in enumerate(merges)}
    return {**vocabulary, **added, **ranks}
