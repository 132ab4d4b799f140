"""Exporting a model to a GGUF file, for llama.cpp and programs built on it.

    linear weights        Q8_0: 32 elements along K share a float16 d, w ≈ q * d, q int8, d = amax / 127; or F16
    embedding and head    F16
    vectors               F32

Q8_0 holds integers, so weights are cast from those of the model, not from a packed folder. Names come from the package
`gguf` (extra `gguf`; github.com/ggml-org/llama.cpp, gguf-py). In its architecture "llama", which is also Mistral's,
llama.cpp applies the rotary embedding to neighbours (2i, 2i + 1), and transformers to halves (i, i + d/2). So the rows
of q and k are reordered:

    row (h, i, half) of the file = row (h, half, i) of the model,   h a head, i = 0 .. d/2 - 1

In its architecture "qwen2" llama.cpp rotates halves too.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.architectures import ARCHITECTURES
from octavo.checkpoint.files import ArtifactError, read_json
from octavo.checkpoint.folder import check_links, locked_folder, read_card, writing
from octavo.hf.source import Source, open_source
from octavo.util import Progress, import_extra, no_progress

WEIGHTS = ("q8_0", "f16")
_BLOCK = 32
_LARGEST = {"f16": 65504.0, "q8_0": 127 * 65504.0}


@dataclass(frozen=True)
class GgufReport:
    """The file that `export_gguf` wrote."""

    path: Path
    bytes: int
    architecture: str  # its name in GGUF
    types: Mapping[str, int]  # the number of tensors of each type
    remarks: Sequence[str] = ()  # what a reader of the file gets wrong


def export_gguf(
    source: str | Path,
    out: str | Path,
    *,
    weights: str = "q8_0",
    tokenizer: bool = True,
    step: int | None = None,
    progress: Progress = no_progress,
) -> GgufReport:
    """Write a run or a Hugging Face folder of a Llama, Mistral or Qwen2 to one GGUF file `out`, which appears whole or
    not at all, with linear weights in q8_0 or f16. Memory: about one tensor.

    Raises the errors of `octavo.packing.pack`. A ValueError names an architecture, a feature of it, or a size that is
    not supported; an ArtifactError names a number beyond F16, or a tokenizer of another kind.
    """
    source, out = Path(source), Path(out)
    if weights not in WEIGHTS:
        raise ValueError(f"unknown type {weights!r} of weights: choose one of {', '.join(WEIGHTS)}")
    if out.exists():
        raise FileExistsError(f"{out} exists already: choose another file")
    gguf = import_extra("gguf", "gguf", "a GGUF file is written with the package gguf")
    opened = open_source(source, step)
    for folder in {opened.description, opened.origin}:
        check_links(folder)
    model = _Model(gguf, opened, weights)
    no_words = {"tokenizer.ggml.model": "none"}
    words = _tokenizer(gguf, opened.description, model.vocabulary) if tokenizer else no_words
    with locked_folder(out):
        size = _write(model, out, _metadata(model) | words, model.data(progress))
    biased = model.architecture == "llama" and any(name.endswith(".bias") for name in model.tensors)
    unread = ["biases"] * biased + ["rotary factors (rope_type llama3)"] * (model.frequencies is not None)
    remarks = [
        f"this model has {each}: llama.cpp reads them, and transformers leaves them out unless it gets "
        f"config=AutoConfig.from_pretrained({str(opened.description)!r})"
        for each in unread
    ]
    return GgufReport(out, size, model.architecture, model.types, remarks)


class _Model:
    """The tensors of the file by their names in GGUF, known before any weight is read."""

    def __init__(self, gguf: Any, source: Source, weights: str) -> None:
        self.gguf, self.source, self.config = gguf, source, source.config
        config = self.config
        self.architecture = _architecture(config, source.description)
        self.heads = int(self.required("num_attention_heads"))
        self.key_heads = int(config.get("num_key_value_heads") or self.heads)
        self.width = int(self.required("hidden_size"))
        self.head_width = int(config.get("head_dim") or self.width // self.heads)
        self.frequencies = _rope_factors(config, self.head_width)
        arch = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[self.architecture]
        self._names = gguf.get_tensor_name_map(arch, int(self.required("num_hidden_layers")))
        linears = set(source.meta_model.linears())
        # The shape and the type (f32, f16 or q8_0) of every tensor, in the order of `data`.
        self.tensors: dict[str, tuple[tuple[int, ...], str]] = {}
        if self.frequencies is not None:
            self.tensors["rope_freqs.weight"] = tuple(self.frequencies.shape), "f32"
        for name, spec in source.specs.items():
            self.tensors[self.name(name)] = spec.shape, self._type(name, spec.shape, linears, weights)
        self.types = dict(Counter(kind for _, kind in self.tensors.values()))
        self.vocabulary = self.tensors["token_embd.weight"][0][0]

    def required(self, key: str) -> Any:
        if self.config.get(key) is None:
            raise ArtifactError(f"{self.source.description / 'config.json'} must state {key}: GGUF needs it")
        return self.config[key]

    def name(self, tensor: str) -> str:
        found = self._names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ValueError(f"{tensor} has no name in GGUF's architecture {self.architecture}: it cannot be written")
        return str(found)

    def _type(self, name: str, shape: tuple[int, ...], linears: set[str], weights: str) -> str:
        if len(shape) == 1:
            return "f32"
        linear = name.removesuffix(".weight") in linears and self.name(name) != "output.weight"
        if linear and weights == "q8_0" and shape[1] % _BLOCK:
            raise ValueError(f"{name}: {list(shape)} has no whole blocks of {_BLOCK}, which q8_0 needs: --scheme f16")
        return weights if linear else "f16"

    def data(self, progress: Progress) -> Iterator[Tensor]:
        """Every tensor in float32, read at its first use."""
        if self.frequencies is not None:
            yield self.frequencies
        for done, name in enumerate(self.source.specs, start=1):
            tensor, (_, kind) = self.source.get(name), self.tensors[self.name(name)]
            if tensor.abs().max() > (largest := _LARGEST.get(kind, math.inf)):
                raise ArtifactError(f"{self.source.origin}: {name} exceeds {largest:g}, the largest of {kind}")
            heads = {"q_proj": self.heads, "k_proj": self.key_heads}.get(name.split(".")[-2])
            if self.architecture == "llama" and heads is not None:  # rows in the order in which llama.cpp rotates them
                tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
            yield tensor.float()
            progress(done, len(self.source.specs), "exporting")


def _architecture(config: Mapping[str, Any], folder: Path) -> str:
    """The name of the architecture in GGUF. Raises a ValueError if GGUF lacks a feature of the model."""
    kind, names = config.get("model_type"), {e.model_type: e.gguf for e in ARCHITECTURES.values() if e.gguf}
    if kind not in names:
        raise ValueError(
            f"{folder} is of the model_type {kind!r} (a GPT-2 is read as 'opt'), which has no export to GGUF: "
            f"{', '.join(names)} have one"
        )
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"{folder} has hidden_act {act!r}, and GGUF's {names[kind]} has silu only")
    window, context = config.get("sliding_window"), config.get("max_position_embeddings")
    if config.get("use_sliding_window", True) and isinstance(window, int) and window < (context or math.inf):
        raise ValueError(
            f"{folder} attends to a window of {window} tokens, which GGUF's {names[kind]} does not have: if "
            f"texts of {window} tokens are enough, set max_position_embeddings to {window} in its config.json"
        )
    return names[kind]


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the rotary embedding, from newer (`rope_parameters`) and older files."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = found.get("rope_theta", config.get("rope_theta", 10000.0))
    return {**found, "rope_theta": float(theta), "rope_type": found.get("rope_type", found.get("type", "default"))}


def _rope_factors(config: Mapping[str, Any], head_width: int) -> Tensor | None:
    """The divisors of the rotary frequencies, float32 [d/2], for Llama 3.1's scaled rotary embedding; else None.

    With w = 2 pi / frequency and s = (original / w - low) / (high - low), cut to [0, 1], a divisor is
    1 / ((1 - s) / factor + s): 1 for w < original / high, factor for w > original / low.
    """
    rope = _rope(config)
    if rope["rope_type"] == "default":
        return None
    if rope["rope_type"] != "llama3":
        raise ValueError(f"rope_type {rope['rope_type']!r} has no export to GGUF: default and llama3 have one")
    factor, low, high = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(rope["original_max_position_embeddings"])
    exponents = torch.arange(0, head_width, 2, dtype=torch.float64) / head_width
    wavelength = 2 * math.pi * rope["rope_theta"] ** exponents
    share = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - share) / factor + share)).float()


def _metadata(model: _Model) -> dict[str, Any]:
    arch, name = model.architecture, model.source.origin.name
    named = re.search(r"^license: *['\"]?([\w.-]+)", read_card(model.source.description)[0], re.MULTILINE)
    licence = {"general.license": named[1]} if named else {}
    return licence | {
        # transformers takes a Llama with the name "mistral" for an architecture of that name, which GGUF does not have.
        "general.name": name.capitalize() if name == "mistral" else name,
        "general.file_type": 7 if "q8_0" in model.types else 1,
        "general.quantization_version": 2,
        f"{arch}.vocab_size": model.vocabulary,
        f"{arch}.context_length": int(model.required("max_position_embeddings")),
        f"{arch}.embedding_length": model.width,
        f"{arch}.block_count": int(model.required("num_hidden_layers")),
        f"{arch}.feed_forward_length": int(model.required("intermediate_size")),
        f"{arch}.attention.head_count": model.heads,
        f"{arch}.attention.head_count_kv": model.key_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": float(model.required("rms_norm_eps")),
        f"{arch}.attention.key_length": model.head_width,
        f"{arch}.attention.value_length": model.head_width,
        f"{arch}.rope.dimension_count": model.head_width,
        f"{arch}.rope.freq_base": _rope(model.config)["rope_theta"],
    }


def _write(model: _Model, path: Path, metadata: Mapping[str, Any], data: Iterable[Tensor]) -> int:
    """Write `data`, in the order of `model.tensors`, to the file `path`, whole or not at all; return its bytes."""
    gguf, partial = model.gguf, path.parent / f".{path.name}.partial"
    writer = gguf.GGUFWriter(partial, model.architecture)
    values, types = gguf.GGUFValueType, gguf.GGMLQuantizationType
    with ExitStack() as stack:
        stack.enter_context(writing(path))
        stack.callback(partial.unlink, missing_ok=True)
        stack.callback(writer.close)
        for key, value in metadata.items():
            if value not in ("", []):  # an empty list would have no type of its elements
                writer.add_key_value(key, value, values.UINT32 if type(value) is int else values.get_type(value))
        for name, (shape, kind) in model.tensors.items():
            in_bytes = gguf.quant_shape_to_byte_shape(shape, types[kind.upper()])
            writer.add_tensor_info(name, in_bytes, np.dtype("uint8"), math.prod(in_bytes), types[kind.upper()])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for (_, kind), tensor in zip(model.tensors.values(), data, strict=True):
            writer.write_tensor_data(gguf.quantize(tensor.contiguous().numpy(), types[kind.upper()]))
        writer.close()
        partial.rename(path)
        return path.stat().st_size


# ---- A tokenizer.json as the metadata of a GGUF file.
#
# llama.cpp knows byte-level BPE tokenizers by name (`tokenizer.ggml.pre`). A name stands for the regular expression
# that splits a text into words, and for whether a word that is a token is looked up before merging. With a wrong name,
# llama.cpp would split in other places, without a message. So a tokenizer that is none of those below is refused.


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # ggml's kinds of tokens
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)  # fmt: skip
# (the expression of the Split before ByteLevel, or ""; ignore_merges) -> llama.cpp's name
_NAMES = {("", False): "gpt-2", (_LLAMA3, True): "llama-bpe", (_LLAMA3.replace("{1,3}", ""), False): "qwen2"}
_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}  # the names of special tokens in GGUF


def _tokenizer(gguf: Any, folder: Path, size: int) -> dict[str, Any]:
    """The tokenizer of a folder as keys and values of GGUF. Of `size` rows of the embedding, some may have no token."""
    path = folder / "tokenizer.json"
    found = read_json(path)
    model = found.get("model") or {}
    pieces = model.get("type") == "BPE" and bool(model.get("byte_fallback"))  # spells text without a piece as bytes
    pre = "default" if pieces else _pre_tokenizer(found, path)
    blank = {"tokenizer.ggml.add_space_prefix": prepends_blank(found, path)} if pieces else {}
    ids = {token: int(i) for token, i in model["vocab"].items()}
    added = {str(entry["content"]): entry for entry in found.get("added_tokens") or []}
    ids |= {content: int(entry["id"]) for content, entry in added.items()}
    if ids and max(ids.values()) >= size:
        raise ArtifactError(
            f"{path} has the token {max(ids.values())}, the embedding has {size} rows: give the tokenizer of the model"
        )
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for token, i in ids.items():
        tokens[i] = token
        kinds[i] = NORMAL if token not in added else CONTROL if added[token].get("special") else USER_DEFINED
    for token, kind in special_kinds(found).items() if pieces else ():
        if token in ids:
            kinds[ids[token]] = kind
    merges, special = _merges(found, path), gguf.SpecialVocab(folder, special_token_types=tuple(_SPECIAL), n_vocab=size)
    return {
        "tokenizer.ggml.model": "llama" if pieces else "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [] if pieces else [" ".join(pair) for pair in merges],
        "tokenizer.ggml.scores": scores(found, merges, tokens, path) if pieces else [],
        "tokenizer.ggml.add_bos_token": special.add_special_token.get("bos", False),
        **{f"tokenizer.ggml.{_SPECIAL[name]}_token_id": i for name, i in special.special_token_ids.items()},
        **blank,
        "tokenizer.chat_template": special.chat_template if isinstance(special.chat_template, str) else "",
    }


def _pre_tokenizer(found: Mapping[str, Any], path: Path) -> str:
    model, normalizer, cut = found.get("model") or {}, found.get("normalizer"), found.get("pre_tokenizer") or {}
    steps = cut["pretokenizers"] if cut.get("type") == "Sequence" else [cut]
    kinds = [step.get("type") for step in steps]
    if model.get("type") != "BPE" or kinds not in (["ByteLevel"], ["Split", "ByteLevel"]):
        raise ArtifactError(
            f"{path} is neither a byte-level BPE ({model.get('type')}, cut by {kinds}) nor one like SentencePiece's: "
            "--no-tokenizer writes the weights only"
        )
    bytes_, split = steps[-1], steps[0] if len(steps) > 1 else None
    regex = "" if split is None else str((split.get("pattern") or {}).get("Regex"))
    name = _NAMES.get((regex, bool(model.get("ignore_merges"))))
    whole = split is None or (split.get("behavior") == "Isolated" and not split.get("invert"))
    plain = not bytes_.get("add_prefix_space") and bool(bytes_.get("use_regex", True)) == (split is None)
    composed = normalizer is None or normalizer.get("type") == "NFC"  # llama.cpp leaves NFC to its caller
    if name is None or not whole or not plain or not composed:
        raise ArtifactError(
            f"{path} splits texts in a way that llama.cpp has no name for (known: {', '.join(_NAMES.values())}): "
            "--no-tokenizer writes the weights only"
        )
    return name


def _merges(found: Mapping[str, Any], path: Path) -> list[tuple[str, str]]:
    merges = [pair.split(" ") if isinstance(pair, str) else list(pair) for pair in found["model"].get("merges") or []]
    if wrong := [pair for pair in merges if len(pair) != 2 or any(" " in token for token in pair)]:
        raise ArtifactError(f"{path}: a merge must be two tokens without blanks, got {wrong[0]!r}")
    if not merges:
        raise ArtifactError(f"{path} has no merges, which llama.cpp requires: --no-tokenizer writes the weights only")
    return [(pair[0], pair[1]) for pair in merges]


# ---- A SentencePiece-like BPE (the tokenizer.json of Llama 2 and Mistral) in llama.cpp's form: pieces with scores.
#
# A tokenizer.json lists merges in order. SentencePiece has scores of pieces instead, and joins the two neighbours whose
# piece has the highest score. Both give the same tokens if every way to cut a piece in two is a merge, and if the
# merges of a piece follow each other in the list. Then the score of a piece is minus the position of its first merge.
# Other tokenizers are refused.


_BLANK = "▁"
_PREPEND = {"type": "Prepend", "prepend": _BLANK}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}


def prepends_blank(found: Mapping[str, Any], path: Path) -> bool:
    """True if the tokenizer puts a blank before a text; an ArtifactError if it treats blanks unlike SentencePiece."""
    normalizer, cut = found.get("normalizer"), found.get("pre_tokenizer")
    if cut is None and normalizer == {"type": "Sequence", "normalizers": [_PREPEND, _REPLACE]}:
        return True
    if cut is None and normalizer in (_REPLACE, {"type": "Sequence", "normalizers": [_REPLACE]}):
        return False
    whole = isinstance(cut, dict) and cut.get("type") == "Metaspace" and cut.get("replacement") == _BLANK
    if normalizer is None and whole and isinstance(cut, dict) and cut.get("split") is False:
        return cut.get("prepend_scheme") in ("first", "always")
    raise ArtifactError(
        f"{path} treats blanks in another way than SentencePiece, which llama.cpp cannot follow: --no-tokenizer "
        "writes the weights only"
    )


def special_kinds(found: Mapping[str, Any]) -> dict[str, int]:
    """The kinds of the tokens for bytes and for unknown text, by their texts."""
    kinds = {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    unknown = found["model"].get("unk_token")
    return kinds if unknown is None else kinds | {str(unknown): UNKNOWN}


def scores(
    found: Mapping[str, Any], merges: Sequence[tuple[str, str]], tokens: Sequence[str], path: Path
) -> list[float]:
    """The score of each token: minus the position of the first merge that makes it; the lowest for all others. An
    ArtifactError if SentencePiece would join other neighbours than the `merges` do."""
    places: dict[str, list[int]] = {}
    for place, (left, right) in enumerate(merges):
        places.setdefault(left + right, []).append(place)
    vocabulary, known = found["model"]["vocab"], set(merges)
    skipped = {entry["content"] for entry in found.get("added_tokens") or []} | special_kinds(found).keys()
    for piece in vocabulary:
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))] if piece not in skipped else []
        missing = [cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary and cut not in known]
        own = places.get(piece, [])
        if missing or (own and own[-1] - own[0] != len(own) - 1):
            raise ArtifactError(
                f"{path}: the merges of the piece {piece!r} are incomplete or not next to each other, so that its "
                "tokens are not those of SentencePiece: --no-tokenizer writes the weights only"
            )
    return [-float(places[token][0]) if token in places else -float(len(merges)) for token in tokens]
