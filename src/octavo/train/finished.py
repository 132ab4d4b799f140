"""The models and the text that commands open: of finished runs and of folders; and the dtypes of a model."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.checkpoint.files import ArtifactError, read_json
from octavo.checkpoint.folder import RUN_OR_MODEL, RunFolder, check_config
from octavo.data import ReadReport
from octavo.inference.opening import OpenedModel, open_model
from octavo.inspection.dtype_report import DtypeFlow, dtype_flow
from octavo.models.decoder import logits_of
from octavo.models.tokenizer import Batches, build_corpus, load_tokenizer
from octavo.train import model as models
from octavo.train.config import Config
from octavo.train.loss import AUTOCAST
from octavo.train.saving import load_model
from octavo.train.settings import known_vocabulary, load_config, read_settings
from octavo.train.supervision import apply_promotions
from octavo.util import choose_device

ANY_MODEL = "a run of octavo train, a folder of octavo pack, or a Hugging Face model folder"


def open_source(source: Path, step: int | None, device: str) -> OpenedModel:
    """The model of a run, a packed folder or a Hugging Face folder."""
    check_config(source, ANY_MODEL)
    if RunFolder(source).has_model:
        return open_run(source, step, device)
    if step is not None:
        raise ValueError(f"{source} is a model, not a run of octavo train: it has no steps")
    return open_model(source, device)


def open_run(path: Path, step: int | None = None, device: str = "auto") -> OpenedModel:
    """The checkpoint of `step` (None: the newest) of the run in `path`, in the recipe that it was trained in. An
    ArtifactError if it is not whole."""
    run, place = RunFolder(path), choose_device(device)
    checkpoint = run.chosen(step)
    config = read_settings(run)
    tokenizer = load_tokenizer(run.model)
    model = models.make_model(config, tokenizer.vocabulary_size, run.model, place).to(place)
    models.convert_model(model, config)
    step = run.step_of(checkpoint)
    apply_promotions(model, (each for each in run.read_actions().promotions if each.step <= step))
    load_model(checkpoint, model)
    title = f"{path}, step {step}, {config.recipe}"
    return OpenedModel(model.eval(), tokenizer, config.context, place, run.model, title, config.precision)


def held_out(path: Path, opened: OpenedModel) -> tuple[Batches, int, ReadReport]:
    """The batches on which the run in `path` evaluates, for another model, their number, and a report of the text."""
    run = RunFolder(path)
    if not run.has_model:
        raise ValueError(f"{path} is no run of octavo train, so no text was held out: give --data, or --held-out RUN")
    config = read_settings(run)
    if config.context > opened.context:
        raise ValueError(f"the run {path} has sequences of {config.context} tokens, the model sees {opened.context}")
    _, reading = models.open_data(config, run.model)
    corpus = build_corpus(reading.texts, opened.tokenizer, config.context, config.validation_fraction)
    return Batches(corpus.validation, config.context, config.batch, None), config.evaluate_batches, reading.report


def trace_source(source: Path, changes: dict[str, Any]) -> DtypeFlow:
    """The dtype flow of a step of a preset, TOML file, run, or folder or config.json of a causal language model. The
    logits are computed as a whole, whatever `loss.logits` is. No weight is read or stored."""
    config, saved = _read(source, changes)
    known = load_tokenizer(saved).vocabulary_size if saved.exists() else known_vocabulary(config)
    # Llama 3's where nobody knows it: the dtypes do not depend on it.
    model = models.make_model(config, known or 128256, saved, models.META).train()
    models.convert_model(model, config.change(only_if_faster=False), torch.device("cpu"))
    models.prepare_blocks(model, config.change(**{"compile.blocks": False}))
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
        context = min(models.positions_of(folder), 4096)
        return Config().change(**{"model": str(folder), "batch": 1, "context": context} | changes), nowhere
    if source.is_dir():
        raise ArtifactError(f"{source}/config.json names no model_type: give {RUN_OR_MODEL}")
    return load_config(source).change(**changes), nowhere
