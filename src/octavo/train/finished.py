"""Opening a run of `octavo train`: its model with the weights of a checkpoint, and its validation text."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from octavo.artifact.run import RunFolder
from octavo.device import choose_device
from octavo.models.tokenizer import Tokenizer, load_tokenizer
from octavo.text import ReadReport
from octavo.train.actions import Actions
from octavo.train.checkpoint import load_model
from octavo.train.config import Config
from octavo.train.data import Batches, build_corpus, open_data
from octavo.train.model import convert_model, make_model
from octavo.train.run_settings import read_settings


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """The model of a run at one step, in evaluation mode, its linear layers in the recipe that it was trained in."""

    config: Config
    step: int
    model: nn.Module
    tokenizer: Tokenizer
    device: torch.device


def open_run(path: Path, step: int | None = None, device: str = "auto") -> FinishedRun:
    """Open the checkpoint of a run.

    Args:
        path: the folder of the run.
        step: the step of the checkpoint; None takes the newest.
        device: the device of the model, as `octavo.device.choose_device` takes it.

    Raises:
        ArtifactError: no run, no such checkpoint, or one that is not whole.
        ValueError: the device is not there.
    """
    run, place = RunFolder(path), choose_device(device)
    checkpoint = run.chosen(step)
    config = read_settings(run)
    tokenizer = load_tokenizer(run.model)
    model = make_model(config, tokenizer.vocabulary_size, run.model).to(place)
    convert_model(model, config)
    Actions.read(run).apply(model, run.step_of(checkpoint))
    load_model(checkpoint, model)
    return FinishedRun(config, run.step_of(checkpoint), model.eval(), tokenizer, place)


def held_out(path: Path, tokenizer: Tokenizer) -> tuple[Batches, ReadReport]:
    """The validation batches of the run in the folder `path`, and the report of reading its text.

    Args:
        path: the folder of the run.
        tokenizer: of the model that is evaluated, which cuts the same text.

    Raises:
        ArtifactError: no run.
        DataError: its data can no longer be read.
    """
    run = RunFolder(path)
    run.check()
    config = read_settings(run)
    _, reading = open_data(config, run.model)
    corpus = build_corpus(reading.texts, tokenizer, config.context, config.validation_fraction)
    return Batches(corpus.validation, config.context, config.batch, None), reading.report
