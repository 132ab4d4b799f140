"""From settings to the model that is trained: one of ours, or a Hugging Face causal language model from a folder."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.models import BUILT_IN_MODELS, GPT2Config, LlamaConfig, MixtureConfig, build
from octavo.models import Config as ModelConfig
from octavo.models.tokenizer import Tokenizer
from octavo.nn import Conversion, convert, use_fp8_attention
from octavo.nn.backends import choose_recipe
from octavo.ops.attention_fp8 import GRADIENT_TILE
from octavo.recipe import Recipe
from octavo.train.config import Config, ConfigError
from octavo.train.hugging_face import describe_language_model, open_language_model
from octavo.train.memory import total_memory

Forward = Callable[..., Any]  # a model, or a function that calls one


def make_model(config: Config, vocabulary: int, saved: Path) -> nn.Module:
    """The model of `config`, its weights drawn in FP32 from torch's seed or read from the Hugging Face folder.

    A resumed run, whose `saved` folder exists, gets the architecture only: the checkpoint has the weights.
    """
    ours = config.model in BUILT_IN_MODELS
    return cast_weights(build(_built_in(config, vocabulary)) if ours else open_language_model(config, saved), config)


def cast_weights(model: nn.Module, config: Config) -> nn.Module:
    """`model`, with its parameters in the dtype of the settings. Buffers, such as rotary frequencies, stay in FP32."""
    if config.optimizer.weights == "bf16":
        for p in model.parameters():
            p.data = p.data.to(torch.bfloat16)
    return model


def make_meta_model(config: Config, vocabulary: int, saved: Path) -> nn.Module:
    """The model of `make_model` on the meta device: its parameters have shapes, and no memory."""
    if config.model in BUILT_IN_MODELS:
        with torch.device("meta"):
            return make_model(config, vocabulary, saved)
    return describe_language_model(config, saved)


def convert_model(model: nn.Module, config: Config, device: torch.device | None = None, shares: int = 1) -> Conversion:
    """Convert the linear layers and the attention of `model` as `config` says; returns the report.

    Args:
        device: where a model that is on the meta device will run.
        shares: the processes that divide a micro-batch among themselves.
    """
    report = convert(
        model,
        chosen_recipe(config, next(model.parameters()).device if device is None else device),
        skip=config.skip,
        device=device,
        emulate=config.emulate,
        only_if_faster=config.only_if_faster,
        tokens=config.batch // shares * config.context,
    )
    if config.attention.precision == "fp8":
        _check_attention(config, next(model.parameters()).device if device is None else device)
        use_fp8_attention(model, shortest=config.attention.shortest, device=device)
    return report


def _check_attention(config: Config, device: torch.device) -> None:
    """Raise a ConfigError if no sequence of the run would attend in FP8."""
    if config.context < config.attention.shortest:
        raise ConfigError(
            f"attention.precision = fp8 is for sequences of attention.shortest = {config.attention.shortest} tokens "
            f"and more, and context is {config.context}: lower attention.shortest, or leave attention in bf16"
        )
    if device.type == "cuda" and config.context % GRADIENT_TILE:
        raise ConfigError(
            f"attention.precision = fp8 takes a context that is a multiple of {GRADIENT_TILE} on a GPU, got "
            f"{config.context}: round it, or leave attention in bf16"
        )
    if config.dropout:
        raise ConfigError(
            f"attention.precision = fp8 has no dropout, and dropout is {config.dropout}: set one of the two back"
        )


def chosen_recipe(config: Config, device: torch.device) -> Recipe:
    """The recipe that `config` runs on `device`."""
    return choose_recipe(config.recipe, device).in_bf16(*config.bf16_gemms)


def check_memory(config: Config, vocabulary: int, device: torch.device, parts: int = 1) -> None:
    """Raise a ConfigError if weights, gradients and AdamW's moments of a built-in model exceed the memory of `device`.

    Args:
        parts: of which each process has one (dp_shard x tp).
    """
    if config.model not in BUILT_IN_MODELS:
        return
    count, total = _count_parameters(_built_in(config, vocabulary)), total_memory(device)
    each = _bytes_of_parameter(config)
    needed = None if count is None else count * each / parts
    if needed is None or needed > total:
        known = "too many to count" if count is None else f"{count:.3g}"
        size = "" if needed is None else f", {needed / 1e9:,.0f} GB before activations"
        divided = f", divided among {parts} processes" if parts > 1 else ""
        raise ConfigError(
            f"the model of these settings has too many parameters ({known}) for this device: training takes {each} "
            f"bytes for each (weight, gradient and two moments){divided}{size}; {device} has "
            f"{total / 1e9:,.0f} GB. Lower width, mlp_width or layers"
            + (", or train on more GPUs: torchrun --nproc-per-node N" if device.type == "cuda" else "")
        )


def _bytes_of_parameter(config: Config) -> int:
    """The bytes that a parameter takes in training: its weight, its gradient and two moments."""
    weight = 2 if config.optimizer.weights == "bf16" else 4
    gradient = weight if config.accumulate == 1 else 4
    return weight + gradient + (8 if config.optimizer.state == "fp32" else 2)


def _count_parameters(config: ModelConfig) -> int | None:
    """The number of parameters; None if a tensor would have more elements than PyTorch can count."""
    counts = []
    try:
        with torch.device("meta"):  # any number of layers from two small models
            for layers in (1, 2):
                model = build(dataclasses.replace(config, layers=layers))
                counts.append(sum(p.numel() for p in model.parameters()))
    except (RuntimeError, TypeError):
        return None
    return counts[0] + (config.layers - 1) * (counts[1] - counts[0])


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
    sizes: dict[str, Any] = {
        "vocabulary": vocabulary,
        "layers": config.layers,
        "width": config.width,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "mlp_width": config.mlp_width,
        "context": config.context,
        "tied": config.tied,
        "rope_theta": config.rope_theta,
        "dropout": config.dropout,
    }
    if config.model == "llama":
        return LlamaConfig(**sizes)
    experts = config.experts
    shared, balance = experts.shared_width, experts.balance
    return MixtureConfig(**sizes, experts=experts.count, top_k=experts.top_k, shared_width=shared, balance=balance)
