"""The dtype flow of a language model that is described by settings, a run, or a Hugging Face folder."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.artifact.files import ArtifactError, read_json
from octavo.artifact.run import RUN_OR_MODEL, RunFolder, check_config
from octavo.flow import DtypeFlow, dtype_flow
from octavo.models.causal import logits_of
from octavo.models.tokenizer import load_tokenizer
from octavo.train.blocks import prepare_blocks
from octavo.train.config import Config
from octavo.train.evaluation import AUTOCAST
from octavo.train.hugging_face import positions_of
from octavo.train.model import cast_weights, convert_model, make_meta_model
from octavo.train.run_settings import read_settings
from octavo.train.vocabulary import known_vocabulary

_LONGEST = 4096  # the context of a model with more positions
_LLAMA_3 = 128256


def trace_source(source: Path, changes: dict[str, Any]) -> DtypeFlow:
    """The dtype flow of a step of training: a micro-batch under the autocast, recipe and checkpointing of the settings.

    The logits are computed as a whole, whatever `loss.logits` is. No weight is read or stored.

    Args:
        source: a preset's name, a TOML file of settings, a run of octavo train, or the folder or config.json of a
            causal language model of Hugging Face.
        changes: other values of settings, such as {"recipe": "bf16", "batch": 8}.

    Raises:
        ConfigError, ArtifactError: no such source, a packed folder, or a model that octavo train does not take.
    """
    config, saved = _read(source, changes)
    model = make_meta_model(config, _vocabulary(config, saved), saved)
    model = cast_weights(model.train(), config)
    convert_model(model, config.change(only_if_faster=False), torch.device("cpu"))
    prepare_blocks(model, config.change(**{"compile.blocks": False}))
    tokens = torch.zeros(config.batch, config.context, dtype=torch.long, device="meta")
    return dtype_flow(model, tokens, autocast=AUTOCAST.get(config.precision), loss=_next_token_loss)


def _next_token_loss(output: Any) -> Tensor:
    logits = logits_of(output).flatten(0, 1).float()  # [B T, V]
    return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


def _read(source: Path, changes: dict[str, Any]) -> tuple[Config, Path]:
    """The settings of `source` with `changes`, and the folder that describes the model of a run."""
    nowhere = source / "no-saved-model"
    if source.is_dir():
        check_config(source, RUN_OR_MODEL)
    if source.is_dir() and RunFolder(source).has_model:
        return read_settings(RunFolder(source)).change(**changes), RunFolder(source).model
    folder = source.parent if source.name == "config.json" else source
    described = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if described.get("quantization_config"):
        raise ArtifactError(
            f"{folder} is quantized: give the model that it was made from, which a training starts with"
        )
    if "model_type" in described:
        context = min(positions_of(folder), _LONGEST)
        if context == sys.maxsize:
            raise ArtifactError(f"{folder}/config.json states no number of positions: give --context")
        return Config().change(**{"model": str(folder), "batch": 1, "context": context} | changes), nowhere
    if source.is_dir():
        raise ArtifactError(f"{source}/config.json names no model_type: give {RUN_OR_MODEL}")
    return Config.load(source).change(**changes), nowhere


def _vocabulary(config: Config, saved: Path) -> int:
    """The size of the vocabulary. Where nobody knows it, that of Llama 3: the dtypes do not depend on it."""
    if saved.exists():
        return load_tokenizer(saved).vocabulary_size
    return known_vocabulary(config) or _LLAMA_3
