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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.artifact.files import ArtifactError
from octavo.artifact.safetensors_files import Spec
from octavo.extras import import_extra
from octavo.gguf.tokenizer import GgufTokenizer, read_gguf_tokenizer
from octavo.gguf.writer import Content, write_file
from octavo.hf.source import Source, open_source
from octavo.progress import Progress, no_progress

WEIGHTS = ("q8_0", "f16")
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2"}
_BLOCK = 32
_LARGEST = {"f16": 65504.0, "q8_0": 127 * 65504.0}


@dataclass(frozen=True)
class GgufReport:
    """The result of `export_gguf`.

    Attributes:
        path: the file.
        bytes: its size.
        architecture: the name of the architecture in GGUF.
        types: the number of tensors of each type.
        remarks: what a reader of the file gets wrong.
    """

    path: Path
    bytes: int
    architecture: str
    types: Mapping[str, int]
    remarks: Sequence[str] = ()


def export_gguf(
    source: str | Path,
    out: str | Path,
    *,
    weights: str = "q8_0",
    tokenizer: bool = True,
    step: int | None = None,
    progress: Progress = no_progress,
) -> GgufReport:
    """Write a model to one GGUF file, which appears whole or not at all. Memory: about one tensor.

    Args:
        source: the folder of a run of `octavo train`, or of a Hugging Face model: Llama, Mistral or Qwen2.
        out: the file to make.
        weights: the type of linear weights, q8_0 or f16.
        tokenizer: write the tokenizer too.
        step: the checkpoint of a run; None takes the newest.
        progress: called after each tensor (`octavo.progress`).

    Raises:
        FileExistsError: `out` exists.
        FileNotFoundError, ArtifactError: the source is incomplete, holds inf, NaN or a number beyond F16, or has a
            tokenizer of a kind that is not supported.
        ImportError: the package gguf is not installed.
        ValueError: an architecture, a feature of it, or a size that is not supported.
        WriteError: the disk refused.
    """
    source, out = Path(source), Path(out)
    if weights not in WEIGHTS:
        raise ValueError(f"unknown type {weights!r} of weights: choose one of {', '.join(WEIGHTS)}")
    if out.exists():
        raise FileExistsError(f"{out} exists already: choose another file, or remove it first")
    gguf = import_extra("gguf", "gguf", "a GGUF file is written with the package gguf")
    opened = open_source(source, step)
    model = _Model(gguf, opened, weights)
    rows = model.specs["token_embd.weight"].shape[0]
    words = read_gguf_tokenizer(opened.description, opened.config, rows) if tokenizer else None
    size = write_file(gguf, out, model.architecture, _metadata(model, words), model.content(progress))
    return GgufReport(out, size, model.architecture, model.types(), _remarks(model))


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
        self.specs: dict[str, Spec] = {}
        self._types: dict[str, str] = {}
        for name, spec in source.specs.items():
            self.specs[self.name(name)] = spec
            self._types[self.name(name)] = self._type(name, spec, linears, weights)

    def required(self, key: str) -> Any:
        if self.config.get(key) is None:
            raise ArtifactError(f"{self.source.description / 'config.json'} must state {key}: GGUF needs it")
        return self.config[key]

    def name(self, tensor: str) -> str:
        found = self._names.get_name(tensor, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ValueError(
                f"{tensor} has no name in the architecture {self.architecture} of GGUF: it cannot be written"
            )
        return str(found)

    def types(self) -> dict[str, int]:
        types = list(self._types.values()) + ["f32"] * (self.frequencies is not None)
        return {kind: types.count(kind) for kind in dict.fromkeys(types)}

    def _type(self, name: str, spec: Spec, linears: set[str], weights: str) -> str:
        if len(spec.shape) == 1:
            return "f32"
        linear = name.removesuffix(".weight") in linears and self.name(name) != "output.weight"
        if linear and weights == "q8_0" and spec.shape[1] % _BLOCK:
            raise ValueError(
                f"{name}: [{spec.shape[0]}, {spec.shape[1]}] has no whole blocks of {_BLOCK} along K, which q8_0 "
                "needs: --weights f16"
            )
        return weights if linear else "f16"

    def content(self, progress: Progress) -> Content:
        """The shape and type of every tensor, and its data, read when it is asked for."""
        shapes = {name: (spec.shape, self._types[name]) for name, spec in self.specs.items()}
        if self.frequencies is not None:
            shapes = {"rope_freqs.weight": (tuple(self.frequencies.shape), "f32"), **shapes}
        return Content(shapes, self._data(progress))

    def _data(self, progress: Progress) -> Iterator[Tensor]:
        if self.frequencies is not None:
            yield self.frequencies
        for done, name in enumerate(self.source.specs, start=1):
            tensor, kind = self.source.get(name), self._types[self.name(name)]
            if tensor.abs().max() > (largest := _LARGEST.get(kind, math.inf)):
                raise ArtifactError(f"{self.source.origin}: {name} exceeds {largest:g}, the largest of {kind}")
            yield self._ordered(name, tensor).float()
            progress(done, len(self.source.specs), "exporting")

    def _ordered(self, name: str, tensor: Tensor) -> Tensor:
        """The rows of q and k in the order in which the architecture rotates them."""
        module = name.rpartition(".")[0]
        if self.architecture != "llama" or not module.endswith((".q_proj", ".k_proj")):
            return tensor
        heads = self.heads if module.endswith(".q_proj") else self.key_heads
        return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _architecture(config: Mapping[str, Any], folder: Path) -> str:
    """The name of the architecture in GGUF. Raises a ValueError if GGUF lacks a feature of the model."""
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"{folder} is of the model_type {kind!r} (a GPT-2 is read as 'opt'), which has no export to GGUF: "
            f"{', '.join(ARCHITECTURES)} have one"
        )
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"{folder} has hidden_act {act!r}, and GGUF's {ARCHITECTURES[kind]} has silu only")
    window, context = config.get("sliding_window"), config.get("max_position_embeddings")
    if config.get("use_sliding_window", True) and isinstance(window, int) and window < (context or math.inf):
        raise ValueError(
            f"{folder} attends to a window of {window} tokens, which GGUF's {ARCHITECTURES[kind]} does not have: if "
            f"texts of {window} tokens are enough, set max_position_embeddings to {window} in its config.json"
        )
    return ARCHITECTURES[kind]


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
    factors: Tensor = 1 / ((1 - share) / factor + share)
    return factors.float()


def _remarks(model: _Model) -> list[str]:
    """The mistakes of transformers' reader, which assumes the architecture "llama" without biases."""
    if model.architecture != "llama" or not any(name.endswith(".bias") for name in model.specs):
        return []
    return [
        "this model has biases: llama.cpp reads them, and transformers leaves them out unless it gets "
        f"config=AutoConfig.from_pretrained({str(model.source.description)!r})"
    ]


def _name(model: _Model) -> str:
    """The name of the model in the file. transformers takes a Llama with the name "mistral" for an architecture of that
    name, which GGUF does not have."""
    name = model.source.origin.name
    return name.capitalize() if name == "mistral" else name


def _metadata(model: _Model, words: GgufTokenizer | None) -> dict[str, Any]:
    """The keys and values of the file; {arch} stands for its architecture."""
    config, arch = model.config, model.architecture
    rope = _rope(config)
    found = {
        "general.name": _name(model),
        "general.file_type": 7 if "q8_0" in model.types() else 1,
        "general.quantization_version": 2,
        f"{arch}.vocab_size": model.specs["token_embd.weight"].shape[0],
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
        f"{arch}.rope.freq_base": rope["rope_theta"],
    }
    return found | (_vocabulary(words) if words is not None else {"tokenizer.ggml.model": "none"})


def _vocabulary(words: GgufTokenizer) -> dict[str, Any]:
    names = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "padding_token_id", "unk": "unknown_token_id"}
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2" if words.merges else "llama",
        "tokenizer.ggml.pre": words.pre or "default",
        "tokenizer.ggml.tokens": words.tokens,
        "tokenizer.ggml.token_type": words.kinds,
        "tokenizer.ggml.merges": words.merges,
        "tokenizer.ggml.scores": words.scores,
        "tokenizer.ggml.add_bos_token": words.add_bos,
    }
    found |= {f"tokenizer.ggml.{names[name]}": number for name, number in words.special.items()}
    if words.scores:
        found["tokenizer.ggml.add_space_prefix"] = words.prepends_blank
    return found | ({"tokenizer.chat_template": words.chat_template} if words.chat_template else {})
