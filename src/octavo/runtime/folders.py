"""Opening a model folder to run it: a packed folder, or a BF16 folder of Hugging Face's libraries."""

from pathlib import Path

import torch
from torch import nn

from octavo.artifact.files import ArtifactError
from octavo.artifact.packed.layouts import read_config
from octavo.device import choose_device
from octavo.hf.meta_model import read_meta_model
from octavo.hf.outputs import is_language_model
from octavo.hf.source import open_source
from octavo.models.causal import is_causal
from octavo.models.tokenizer import load_tokenizer
from octavo.runtime.build import Loaded, fill_packed


def open_model(folder: Path, device: str | torch.device = "cpu") -> Loaded:
    """The language model of a folder, in evaluation mode, with its tokenizer and its context.

    Args:
        folder: a folder that `octavo pack` wrote, or a Hugging Face model folder, which runs in BF16.
        device: for the model.

    Raises:
        FileNotFoundError, ArtifactError: the folder is incomplete, holds pickles, or its model predicts no next token.
        ImportError: the architecture needs transformers, which is not installed.
        ValueError: the device does not exist.
    """
    place = choose_device(device)
    config = read_config(folder)
    if config.get("quantization_config"):
        packed = read_meta_model(config, folder)
        _require(is_language_model(packed.model), packed.model, folder)
        return fill_packed(packed, folder, place)
    source = open_source(folder)
    model = source.meta_model.model
    _require(is_language_model(model), model, folder)
    model = source.fill_bf16(place)
    tokenizer = load_tokenizer(folder)
    _require(is_causal(model, tokenizer.vocabulary_size), model, folder)
    return Loaded(model, tokenizer, source.meta_model.context)


def _require(predicts: bool, model: nn.Module, folder: Path) -> None:
    if not predicts:
        raise ArtifactError(
            f"{folder} holds a {type(model).__name__}, which predicts no next token: a causal language "
            "model is required (Llama, Qwen, Mistral, GPT-2, ...)"
        )
