"""Finished runs of `octavo train`: opening the model and the validation text of one, and tracing its dtypes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.checkpoint.files import ArtifactError, read_json
from octavo.checkpoint.folder import RUN_OR_MODEL, RunFolder, check_config
from octavo.data import ReadReport
from octavo.inspection.dtype_report import DtypeFlow, dtype_flow
from octavo.models.decoder import logits_of
from octavo.models.tokenizer import Batches, Tokenizer, build_corpus, load_tokenizer
from octavo.train.config import Config
from octavo.train.loss import AUTOCAST
from octavo.train.model import (
    cast_weights,
    convert_model,
    make_meta_model,
    make_model,
    open_data,
    positions_of,
    prepare_blocks,
)
from octavo.train.saving import load_model
from octavo.train.settings import known_vocabulary, load_config, read_settings
from octavo.train.supervision import apply_promotions
from octavo.util import choose_device


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """The model of a run at one step, in evaluation mode, its linear layers in the recipe that it was trained in."""

    config: Config
    step: int
    model: nn.Module
    tokenizer: Tokenizer
    device: torch.device


def open_run(path: Path, step: int | None = None, device: str = "auto") -> FinishedRun:
    """The checkpoint of `step` (None: the newest) of the run in `path`. An ArtifactError if it is not whole."""
    run, place = RunFolder(path), choose_device(device)
    checkpoint = run.chosen(step)
    config = read_settings(run)
    tokenizer = load_tokenizer(run.model)
    model = make_model(config, tokenizer.vocabulary_size, run.model).to(place)
    convert_model(model, config)
    step = run.step_of(checkpoint)
    apply_promotions(model, (each for each in run.read_actions().promotions if each.step <= step))
    load_model(checkpoint, model)
    return FinishedRun(config, step, model.eval(), tokenizer, place)


def held_out(path: Path, tokenizer: Tokenizer) -> tuple[Batches, ReadReport]:
    """The validation batches of the run in the folder `path`, and the report of reading its text."""
    run = RunFolder(path)
    run.check()
    config = read_settings(run)
    _, reading = open_data(config, run.model)
    corpus = build_corpus(reading.texts, tokenizer, config.context, config.validation_fraction)
    return Batches(corpus.validation, config.context, config.batch, None), reading.report


# ---- The dtype flow of a language model that is described by settings, a run, or a Hugging Face folder.


_LONGEST = 4096  # the context of a model with more positions
_LLAMA_3 = 128256


def trace_source(source: Path, changes: dict[str, Any]) -> DtypeFlow:
    """The dtype flow of a step of a preset, TOML file, run, or folder or config.json of a causal language model.

    The logits are computed as a whole, whatever `loss.logits` is. No weight is read or stored.
    """
    config, saved = _read(source, changes)
    known = load_tokenizer(saved).vocabulary_size if saved.exists() else known_vocabulary(config)
    vocabulary = known or _LLAMA_3  # where nobody knows it: the dtypes do not depend on it
    model = make_meta_model(config, vocabulary, saved)
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
    if (folder / "config.json").is_file() and "model_type" in read_json(folder / "config.json"):
        context = min(positions_of(folder), _LONGEST)
        return Config().change(**{"model": str(folder), "batch": 1, "context": context} | changes), nowhere
    if source.is_dir():
        raise ArtifactError(f"{source}/config.json names no model_type: give {RUN_OR_MODEL}")
    return load_config(source).change(**changes), nowhere
