"""From settings to the model that is trained: one of ours, or a Hugging Face causal language model from a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from octavo.models import BUILT_IN_MODELS, GPT2Config, LlamaConfig, build
from octavo.models import Config as ModelConfig
from octavo.models.causal import logits_of
from octavo.models.tokenizer import Tokenizer
from octavo.train.config import Config, ConfigError
from octavo.train.hugging_face import open_language_model

Forward = Callable[..., Any]  # a model, or what torch.compile made of it


def make_model(config: Config, vocabulary: int, saved: Path) -> nn.Module:
    """The model of `config` in FP32, its weights drawn from torch's seed or read from the Hugging Face folder.

    A resumed run, whose `saved` folder exists, gets the architecture only: the checkpoint has the weights.
    """
    if config.model in BUILT_IN_MODELS:
        model = build(_built_in(config, vocabulary))
        model.checkpoint_activations = config.checkpoint_activations
        return model
    return open_language_model(config, saved)


def check_vocabulary(model: nn.Module, highest: int) -> None:
    """Raise a ConfigError unless the model of a Hugging Face folder has an embedding for the token `highest`."""
    hugging_face: Any = model
    rows = hugging_face.get_input_embeddings().num_embeddings
    if highest >= rows:
        raise ConfigError(
            f"the model's embedding has {rows} rows, but its tokenizer makes token {highest} of the data: "
            "give the folder the tokenizer that belongs to the model"
        )


def save_description(model: nn.Module, tokenizer: Tokenizer, config: Config, folder: Path) -> None:
    """Write config.json, in Hugging Face's terms, and the tokenizer to `folder`."""
    folder.mkdir(parents=True)
    if config.model in BUILT_IN_MODELS:
        described: Any = model.config
        (folder / "config.json").write_text(json.dumps(described.to_hf(), indent=2) + "\n")
        tokenizer.save(folder)
        return
    for path in sorted(Path(config.model).iterdir()):  # all but the weights
        if path.suffix in (".json", ".model", ".txt", ".jinja") and not path.name.endswith(".index.json"):
            shutil.copy(path, folder / path.name)


def logits(model: Forward, tokens: Tensor) -> Tensor:
    """[B, T, V] from int64 tokens [B, T], whichever family the model is of."""
    return logits_of(model(tokens))


def _built_in(config: Config, vocabulary: int) -> ModelConfig:
    if config.model == "gpt2":
        return GPT2Config(
            vocabulary=vocabulary,
            layers=config.layers,
            width=config.width,
            heads=config.heads,
            context=config.context,
            tied=config.tied,
            bias=config.bias,
            dropout=config.dropout,
        )
    return LlamaConfig(
        vocabulary=vocabulary,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        kv_heads=config.kv_heads,
        mlp_width=config.mlp_width,
        context=config.context,
        tied=config.tied,
        rope_theta=config.rope_theta,
        dropout=config.dropout,
    )
