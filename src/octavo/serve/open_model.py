"""Open a model folder to run it: packed, or in BF16 as Hugging Face's libraries write it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from octavo.artifact.packed import OTHER_DTYPE, PackedFolder
from octavo.artifact.tensors import ArtifactError, model_tensors
from octavo.device import choose_device
from octavo.models.causal import is_causal
from octavo.models.decoder import Decoder
from octavo.models.tokenizer import load_tokenizer
from octavo.serve.load import Loaded, load
from octavo.serve.skeleton import fill_model
from octavo.serve.source import open_source
from octavo.serve.verify_model import is_language_model


def open_model(folder: Path, device: str | torch.device = "cpu") -> Loaded:
    """The language model of a folder, in evaluation mode, with its tokenizer and its context.

    Args:
        folder: what `octavo pack` wrote, or a Hugging Face model folder, which runs in BF16.
        device: where the model shall be.

    Raises:
        FileNotFoundError, ArtifactError: the folder is not whole, holds pickles, or its model gives no next token.
        ImportError: the architecture needs transformers, which is not installed.
        ValueError: the device is not there.
    """
    place = choose_device(device)
    if PackedFolder(folder).read_config().get("quantization_config"):
        loaded = load(folder, place)
        _require(_predicts(loaded.model), loaded.model, folder)
        return loaded
    source = open_source(folder)
    model = source.skeleton.model
    _require(_predicts(model), model, folder)
    tensors = {name: source.get(name) for name in model_tensors(model)}
    floats = {name: t.to(OTHER_DTYPE) if t.is_floating_point() else t for name, t in tensors.items()}
    model = fill_model(source.skeleton, floats).to(place)
    tokenizer = load_tokenizer(folder)
    _require(is_causal(model, tokenizer.vocabulary_size), model, folder)
    return Loaded(model, tokenizer, source.skeleton.context)


def _predicts(model: nn.Module) -> bool:
    return isinstance(model, Decoder) or is_language_model(model)


def _require(predicts: bool, model: nn.Module, folder: Path) -> None:
    if not predicts:
        raise ArtifactError(
            f"{folder} holds an encoder ({type(model).__name__}), which gives no next token: a causal language model "
            "is required (Llama, Qwen, Mistral, GPT-2, ...)"
        )
