"""Starting and resuming a run: all work between the settings and the first step."""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from octavo.artifact.atomic_folder import locked_folder, write_error
from octavo.artifact.lock import FolderLock
from octavo.artifact.run import RunFolder
from octavo.device import choose_device
from octavo.models import BUILT_IN_MODELS
from octavo.recipe import get_recipe
from octavo.text import absolute_source
from octavo.train.blocks import prepare_blocks
from octavo.train.checkpoint import TrainState, load_checkpoint
from octavo.train.config import Config, ConfigError
from octavo.train.data import Batches, RandomBatches, build_corpus, open_data
from octavo.train.header import header_text
from octavo.train.hugging_face import positions_of
from octavo.train.log import print_line
from octavo.train.loop import Trainer
from octavo.train.loss import make_loss
from octavo.train.metrics import event_writer
from octavo.train.model import check_memory, check_vocabulary, convert_model, make_model, save_description
from octavo.train.optimizer import make_optimizer
from octavo.train.run_settings import read_settings, write_settings


def start_run(config: Config, console: Console) -> Trainer:
    """A new run in `config.out`, at step 0. The run's folder is locked until `Trainer.run` ends.

    Raises:
        ConfigError, DataError: settings or data that cannot be trained on; nothing has been written.
        FileExistsError: `config.out` holds a run already.
        LockedError: another program trains there.
        WriteError: the folder could not be written.
    """
    run = RunFolder(Path(config.out))
    lock = locked_folder(run.path)
    try:
        _check_empty(run)
        if config.model not in BUILT_IN_MODELS:
            config = _fit_to_folder(config)
        config = _absolute_data(config)
        trainer = _prepare(config, run, lock, console)
        _describe(trainer)
    except BaseException:
        lock.release()
        raise
    return trainer


def resume_run(path: Path, overrides: Sequence[str], console: Console) -> Trainer:
    """The run in the folder `path`, at its newest checkpoint; `overrides` are settings that change, as --key value.

    The run's folder is locked until `Trainer.run` ends.

    Raises:
        ArtifactError: no run, no checkpoint, or one that is not whole or does not fit.
        LockedError: another program trains there.
        WriteError: the folder could not be written.
    """
    run = RunFolder(path)
    run.check()
    lock = locked_folder(path)
    try:
        newest = run.newest()
        config = _absolute_data(read_settings(run).replace(overrides))
        if config.out != str(path):
            raise ConfigError(f"a resumed run stays in its folder {path}; got --out {config.out}: leave it out")
        trainer = _prepare(config, run, lock, console)
        load_checkpoint(newest, trainer.state)
        write_settings(config, run)
        print_line(console, f"resumed from {newest}")
    except BaseException:
        lock.release()
        raise
    return trainer


def _fit_to_folder(config: Config) -> Config:
    """The settings with the absolute path of the model's folder, and a context, if not given, within its positions."""
    if not Path(config.model).is_dir():
        names = ", ".join(BUILT_IN_MODELS)
        raise ConfigError(f"model must be {names} or a local Hugging Face folder; {config.model} is none")
    folder = Path(config.model).resolve()
    context = {"context": min(config.context, positions_of(folder))} if "context" in config.derived else {}
    return config.change(model=str(folder), **context)


def _absolute_data(config: Config) -> Config:
    """The settings with data sources that mean the same from another working directory."""
    return config.change(data=tuple(map(absolute_source, config.data)))


def _check_empty(run: RunFolder) -> None:
    if run.path.exists() and not run.path.is_dir():
        raise FileExistsError(f"{run.path} is a file: --out must name the folder of the run, which it makes")
    if run.path.exists() and any(run.path.iterdir()):
        advice = f"resume it with --resume {run.path}" if run.checkpoints() else "it has no checkpoint: remove it"
        raise FileExistsError(f"{run.path} is not empty: {advice}, or choose another --out")


def _describe(trainer: Trainer) -> None:
    """Write the settings of a new run and the description of its model to the run's folder."""
    run = trainer.run_folder
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        save_description(trainer.model, trainer.tokenizer, trainer.config, run.model)
        write_settings(trainer.config, run)
    except OSError as error:
        raise write_error(run.path, error) from error


def _prepare(config: Config, run: RunFolder, lock: FolderLock, console: Console) -> Trainer:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("octavo train runs as one process for now: start it without torchrun")
    if config.recipe != "auto":
        get_recipe(config.recipe)
    if config.tensorboard:
        event_writer()
    device = choose_device(config.device)
    if config.deterministic:  # cuBLAS reads this when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    tokenizer, reading = open_data(config, run.model)
    for line in reading.report.lines():
        print_line(console, line)
    corpus = build_corpus(reading.texts, tokenizer, config.context, config.validation_fraction)
    draw = RandomBatches if config.sampling == "random" else Batches
    training = draw(corpus.train, config.context, config.batch, config.seed)
    validation = Batches(corpus.validation, config.context, config.batch, None)
    check_memory(config, tokenizer.vocabulary_size, device)
    torch.manual_seed(config.seed)
    model = make_model(config, tokenizer.vocabulary_size, run.model).to(device)
    if config.model not in BUILT_IN_MODELS:
        check_vocabulary(model, max(int(corpus.train.max()), int(corpus.validation.max())))
    loss = make_loss(config, model)
    report = convert_model(model, config)
    prepare_blocks(model, config)
    print_line(console, header_text(config, model, device, corpus, report))
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    state = TrainState(model, make_optimizer(model, config), scaler, device, corpus.fingerprint)
    return Trainer(config, state, training, validation, tokenizer, reading.report, run, lock, console, loss)
