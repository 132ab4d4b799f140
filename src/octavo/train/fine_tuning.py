"""A causal language model of transformers, from a local folder, for fine-tuning: all its weights, or adapters alone.

With `lora` the weights of the folder are frozen, in BF16 beneath autocast to it, or in the eight bits of a packed
folder. The adapters of PEFT (`octavo.integrations.peft`) around its linear layers are trained in float32. A checkpoint
holds the adapters, and a resumed run reads the frozen weights from the folder again.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from octavo.checkpoint.files import ArtifactError, ShardReader, read_json
from octavo.checkpoint.layouts import read_config
from octavo.hf.meta_model import (
    DESCRIPTION,
    check_counts,
    check_unpacked,
    compute_buffers,
    is_causal,
    is_language_model,
    quiet_transformers,
    transformers_meta_model,
)
from octavo.inference.opening import fill
from octavo.models import BUILT_IN_MODELS
from octavo.train.config import Config, ConfigError, settings_of
from octavo.util import hub_hint, import_extra, open_config, open_local, reading

CPU = torch.device("cpu")


def open_language_model(config: Config, saved: Path, device: torch.device = CPU) -> nn.Module:
    """The model of the folder `config.model` with its weights, in FP32; of a resumed run with random ones. Where they
    are frozen (`lora`), they are always those of the folder, in BF16 or packed. A packed model is on `device`."""
    auto, source = _transformers(config.model).AutoModelForCausalLM, Path(config.model)
    if saved.exists() and not config.lora:
        check_folder(saved, config)
        with quiet_transformers(), reading(saved, DESCRIPTION, ArtifactError):
            return _prepared(auto.from_config(open_config(saved), dtype=torch.float32), config)
    check_folder(source, config)
    if is_packed(source):
        return _open_packed(config, device)
    reader = ShardReader(source)
    check_unpacked(reader)
    if reader.strays:
        raise ArtifactError(
            f"{source} has {reader.strays[0]} in a second file, which its index takes from another file, and "
            f"transformers would take the last ({len(reader.strays)} such tensors): save the model again"
        )
    dtype = torch.bfloat16 if config.lora and config.precision == "bf16" else torch.float32
    with quiet_transformers(), reading(source, DESCRIPTION, ArtifactError):
        given = {"config": open_config(source), "dtype": dtype, "output_loading_info": True}
        model, found = open_local(auto, source, **given)
        _check_opened(model, sorted(found["missing_keys"]), source)
    return _prepared(model, config)


def describe_language_model(config: Config, saved: Path) -> nn.Module:
    """The model of `open_language_model` with its parameters on the meta device, and its buffers on the CPU."""
    transformers = _transformers(config.model)
    source = saved if saved.exists() else Path(config.model)
    check_folder(source, config)
    described = open_config(source)
    vars(described).pop("quantization_config", None)
    with quiet_transformers(), reading(source / "config.json", DESCRIPTION, ArtifactError), torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.float32)
    compute_buffers(model, "cpu")
    return _prepared(model, config)


def _transformers(name: str) -> Any:
    return import_extra("transformers", "hf", f"model {name!r} is a Hugging Face folder, which transformers opens")


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


def is_packed(folder: Path) -> bool:
    """True if the config.json of a model folder states a quantization."""
    return bool(read_config(folder).get("quantization_config"))


def check_folder(folder: Path, config: Config) -> None:
    """A ConfigError unless transformers has the causal language model of the folder, and its weights can train: those
    of a packed folder cannot, and are for adapters alone."""
    name = config.model
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model must be {', '.join(BUILT_IN_MODELS)} or a local folder with a config.json, got {name!r}"
            + hub_hint(name)
        )
    described = read_json(folder / "config.json")
    if is_packed(folder) and not config.lora:
        raise ConfigError(
            f"{name} is quantized already: train adapters around its weights with --lora 16, or the BF16 model that it "
            f"was made from, or widen it first with octavo unpack {name} OUT"
        )
    check_counts(described, folder)
    transformers = _transformers(name)
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


def _check_opened(model: Any, missing: list[str], source: Path) -> None:
    """Raise an error unless the model is causal, and all of its weights were in the folder, and finite."""
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


def _open_packed(config: Config, device: torch.device) -> nn.Module:
    """The model of a packed folder, on `device`, where it computes with the bytes of the folder."""
    folder = Path(config.model)
    for name in ("recipe", "skip", "bf16_gemms", "only_if_faster"):
        if (value := getattr(config, name)) != settings_of(Config)[name].default:
            raise ConfigError(
                f"{folder} is packed, so its layers compute by its schemes; got {name} {value}: leave it out"
            )
    meta_model = transformers_meta_model(read_config(folder), folder)
    if not is_language_model(meta_model.model):
        raise ConfigError(
            f"{folder} is a {type(meta_model.model).__name__}, which predicts no next token: choose another"
        )
    return _prepared(fill(meta_model, folder, device)[0], config)


def add_adapters(model: nn.Module, config: Config) -> nn.Module:
    """Put the adapters of the settings around the layers of `model`, converted or packed, and freeze all else."""
    if config.lora:
        import_extra("peft", "peft", "lora trains adapters of PEFT")
        from octavo.integrations.peft import inject

        dtype = torch.bfloat16 if config.optimizer.weights == "bf16" else torch.float32
        try:
            inject(model, config.lora, config.alpha, config.targets, dtype, config.model)
        except ValueError as error:
            raise ConfigError(f"{config.model}: {error}") from error
    return model
