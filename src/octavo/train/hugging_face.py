"""A causal language model of transformers, from a local folder, for fine-tuning."""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from octavo.artifact.files import ArtifactError, read_json
from octavo.extras import import_extra, open_local
from octavo.hf.meta_model import compute_buffers
from octavo.hf.quiet import quiet_transformers
from octavo.models import BUILT_IN_MODELS
from octavo.models.causal import is_causal
from octavo.train.config import Config, ConfigError


def open_language_model(config: Config, saved: Path) -> nn.Module:
    """The model of the folder `config.model` in FP32, with its weights.

    Args:
        config: its `model` is a folder with a config.json and safetensors files.
        saved: the folder of a resumed run that describes its model. If it exists, the model has that architecture and
            random weights, because the checkpoint holds the weights.

    Raises:
        ArtifactError: a file of weights is truncated, or holds inf or NaN.
        ConfigError: no such folder, a folder that lacks weights, a model whose attention sees later tokens, or a
            context beyond its positions.
        ValueError: a folder that needs code of its own.
        ImportError: transformers is not installed.
    """
    purpose = f"model {config.model!r} is a Hugging Face folder, which transformers opens"
    transformers = import_extra("transformers", "hf", purpose)
    source = Path(config.model)
    check_folder(saved if saved.exists() else source, config.model)
    with quiet_transformers():  # `_open` checks the facts that its tables report
        model = _open(transformers.AutoModelForCausalLM, transformers.AutoConfig, source, saved)
    return _prepared(model, config)


def describe_language_model(config: Config, saved: Path) -> nn.Module:
    """The model of `open_language_model` with its parameters on the meta device, and its buffers on the CPU."""
    transformers = import_extra("transformers", "hf", f"model {config.model!r} is a Hugging Face folder")
    source = saved if saved.exists() else Path(config.model)
    check_folder(source, config.model)
    described = open_local(transformers.AutoConfig, source)
    with quiet_transformers(), torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.float32)
    compute_buffers(model, "cpu")
    return _prepared(model, config)


def positions_of(folder: Path) -> int:
    """The longest context of the model that `folder`/config.json describes; sys.maxsize if the file states none."""
    path = folder / "config.json"
    described = read_json(path) if path.is_file() else {}  # opening the folder reports its faults
    found = (described.get(key) for key in ("max_position_embeddings", "n_positions", "max_seq_len"))
    return next((number for number in found if isinstance(number, int) and number > 0), sys.maxsize)


def _prepared(model: Any, config: Config) -> nn.Module:
    limit = getattr(model.config, "max_position_embeddings", None) or config.context
    if config.context > limit:
        raise ConfigError(f"context must be at most the model's {limit} positions, got {config.context}")
    model.config.use_cache = False
    trained: nn.Module = model
    return trained


def check_folder(folder: Path, name: str) -> None:
    """Raise a ConfigError unless transformers has a causal language model of the type that `folder`/config.json
    states, and its weights are not quantized.

    Messages call the folder by `name`, which the settings give it.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model must be {', '.join(BUILT_IN_MODELS)} or a local folder with a config.json, got {name!r}"
        )
    described = read_json(folder / "config.json")
    if described.get("quantization_config"):
        raise ConfigError(
            f"{name} is quantized already: train the BF16 model that it was made from, or widen it first with octavo "
            f"unpack {name} OUT"
        )
    transformers = import_extra("transformers", "hf", f"model {name!r} is a Hugging Face folder")
    if (kind := described.get("model_type")) not in transformers.CONFIG_MAPPING and "auto_map" not in described:
        raise ConfigError(
            f"{folder / 'config.json'} has the model_type {kind!r}, which transformers {transformers.__version__} does "
            "not implement: upgrade transformers, or choose another model"
        )
    if kind in transformers.CONFIG_MAPPING and (
        transformers.CONFIG_MAPPING[kind] not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    ):
        raise ConfigError(
            f"{folder / 'config.json'} has the model_type {kind!r}, of which transformers has no causal language "
            "model: octavo train needs one (Llama, Qwen, Mistral, GPT-2, ...). octavo.convert takes any model, for a "
            "training loop of your own, and octavo.dtype_flow(model, inputs) shows its dtypes"
        )


def _open(auto: Any, auto_config: Any, source: Path, saved: Path) -> Any:
    if saved.exists():
        model = auto.from_config(open_local(auto_config, saved), dtype=torch.float32)
        missing: list[str] = []
    else:
        try:
            model, found = open_local(auto, source, dtype=torch.float32, output_loading_info=True)
        except SafetensorError as error:
            raise ArtifactError(f"a safetensors file of {source} is truncated ({error}): get the file again") from error
        missing = sorted(found["missing_keys"])
    if not is_causal(model, model.get_input_embeddings().num_embeddings):
        if damaged := [name for name, p in model.named_parameters() if not p.isfinite().all()]:
            raise ArtifactError(f"{source}: {damaged[0]} holds inf or NaN: take a model that has not diverged")
        raise ConfigError(
            f"{source} is a {type(model).__name__} that is not causal: changing the last token of a sequence changes "
            "the logits of earlier tokens, so its attention sees the token that it is to predict. octavo train "
            "minimizes the loss of the next token, for which a causal language model is required (Llama, Qwen, "
            "Mistral, GPT-2, ...): choose such a model"
        )
    if missing:
        raise ConfigError(
            f"{source} lacks weights of the {type(model).__name__} that its config.json describes: {missing[0]} "
            f"({len(missing)} in all). transformers would draw them at random: complete the folder"
        )
    return model
