"""Starting and resuming a run: all work between the settings and the first step."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from octavo.artifact.atomic_folder import locked_folder, write_error
from octavo.artifact.run import RunFolder
from octavo.calibration.folder import load_calibration
from octavo.extras import hub_hint
from octavo.models import BUILT_IN_MODELS
from octavo.models.tokenizer import Tokenizer
from octavo.nn import seed_scales
from octavo.recipe import get_recipe
from octavo.text import ReadReport, absolute_source
from octavo.train.blocks import allow_compilations
from octavo.train.boards import event_writer, wandb
from octavo.train.checkpoint import TrainState, check_checkpoint, load_checkpoint
from octavo.train.config import Config, ConfigError
from octavo.train.data import Batches, Corpus, RandomBatches, build_corpus, open_data
from octavo.train.header import header_text
from octavo.train.hugging_face import check_folder, positions_of
from octavo.train.log import print_line
from octavo.train.loop import Trainer, TrainingData
from octavo.train.mesh import Degrees, check_async_tp, check_parallel, find_degrees
from octavo.train.model import check_memory, check_vocabulary, make_meta_model, save_description
from octavo.train.optimizer import make_optimizer
from octavo.train.parallel_model import make_parallel_model, make_trained_model
from octavo.train.processes import check_same, group_of_one, on_first, own_device
from octavo.train.ranks import rank, same_outcome, world_size
from octavo.train.run_settings import read_settings, write_settings


def start_run(config: Config, console: Console) -> Trainer:
    """A new run in `config.out`, at step 0. The run's folder is locked until `Trainer.run` ends.

    Every rank of a process group must call this. An error of one rank is raised on all of them.

    Raises:
        ConfigError, DataError: settings or data that cannot be trained on; nothing has been written.
        ArtifactError: the calibration is of another model.
        FileExistsError: `config.out` holds a run already.
        LockedError: another program trains there.
        WriteError: the folder could not be written.
    """
    check_same(config)
    run, lock = RunFolder(Path(config.out)), ExitStack()
    try:
        with same_outcome():
            if rank() == 0:
                lock.enter_context(locked_folder(run.path))
                _check_empty(run)
            config = settle(config)
        trainer = prepare_run(config, run, lock, console)
        with same_outcome():
            if rank() == 0:
                _describe(trainer)
    except BaseException:
        lock.close()
        raise
    return trainer


def resume_run(path: Path, overrides: Sequence[str], console: Console) -> Trainer:
    """The run in the folder `path`, at its newest checkpoint; `overrides` are settings that change, as --key value.

    The run's folder is locked until `Trainer.run` ends. Every rank of a process group must call this. An error of one
    rank is raised on all of them.

    Raises:
        ArtifactError: no run, no checkpoint, or one that is not whole or does not fit.
        LockedError: another program trains there.
        WriteError: the folder could not be written.
    """
    run, lock = RunFolder(path), ExitStack()
    try:
        with same_outcome():
            run.check()
            if rank() == 0:
                lock.enter_context(locked_folder(path))
            newest = run.newest()
            config = _absolute_paths(read_settings(run).replace(overrides))
            if config.out != str(path):
                raise ConfigError(f"a resumed run stays in its folder {path}; got --out {config.out}: leave it out")
            if (step := run.step_of(newest)) > config.steps:
                done = f"the {step} that the run {path} has done"
                raise ConfigError(f"steps must be at least {done}; got {config.steps}: give more --steps")
        check_same(config)
        trainer = prepare_run(config, run, lock, console, newest)
        trainer.actions.apply(trainer.model)
        allow_compilations(len(trainer.actions.promotions))
        load_checkpoint(newest, trainer.state)
        if rank() == 0:
            write_settings(config, run)
        ended = f", the last of its {step} steps: --steps N goes on" if step == config.steps else ""
        print_line(console, f"resumed from {newest}{ended}")
    except BaseException:
        lock.close()
        raise
    return trainer


def settle(config: Config) -> Config:
    """The settings that a new run writes down: those of `config`, with absolute paths.

    Raises:
        ConfigError: the model is neither built in nor a local folder.
    """
    if config.model not in BUILT_IN_MODELS:
        config = _fit_to_folder(config)
    return _absolute_paths(config)


def _fit_to_folder(config: Config) -> Config:
    """The settings with the absolute path of the model's folder, and a context, if not given, within its positions."""
    if not Path(config.model).is_dir():
        names, hint = ", ".join(BUILT_IN_MODELS), hub_hint(config.model)
        raise ConfigError(f"model must be {names} or a local Hugging Face folder; {config.model} is none{hint}")
    folder = Path(config.model).resolve()
    if RunFolder(folder).has_model:
        raise ConfigError(f"{folder} is a run of octavo train: continue it with --resume, or give another --model")
    check_folder(folder, config.model)
    context = {"context": min(config.context, positions_of(folder))} if "context" in config.derived else {}
    return config.change(model=str(folder), **context)


def _absolute_paths(config: Config) -> Config:
    """The settings with data sources and folders that mean the same from another working directory."""
    calibration = str(Path(config.calibration).resolve()) if config.calibration else ""
    return config.change(data=tuple(map(absolute_source, config.data)), calibration=calibration)


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
        write_settings(trainer.config, run)  # first: a job that is started again knows the folder by them
        save_description(trainer.model, trainer.data.tokenizer, trainer.config, run.model)
    except OSError as error:
        raise write_error(run.path, error) from error


class RunData(NamedTuple):
    """The text of a run in tokens, its tokenizer, and the report of the text that was read."""

    tokenizer: Tokenizer
    read: ReadReport
    corpus: Corpus


def prepare_run(
    config: Config,
    run: RunFolder,
    lock: ExitStack,
    console: Console,
    checkpoint: Path | None = None,
    data: RunData | None = None,
) -> Trainer:
    """The run of `config` at step 0, of which nothing is written. Every rank of a process group must call this.

    Args:
        config: checked by `settle`.
        run: its folder, which may have the description of the model.
        lock: what the run holds until `Trainer.run` ends.
        console: for the header.
        checkpoint: that the caller will load: it is checked before memory is taken.
        data: that `read_data` gave for the same settings of data; None reads it.
    """
    with same_outcome():
        degrees, device = _check_settings(config)
    if config.deterministic:  # cuBLAS reads this when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    tokenizer, read, corpus = read_data(config, run, console) if data is None else data
    batches = _make_batches(config, corpus, degrees.share(rank()))
    offload = config.optimizer.offload
    storage = torch.device("cpu") if offload else device
    check_memory(config, tokenizer.vocabulary_size, storage, degrees.dp_shard * degrees.tp)
    if checkpoint is not None:
        with same_outcome():
            meta_model = make_meta_model(config, tokenizer.vocabulary_size, run.model)
            check_checkpoint(checkpoint, meta_model, corpus.fingerprint)
    torch.manual_seed(config.seed)
    if offload:
        lock.enter_context(group_of_one())
    make = make_trained_model if degrees.processes == 1 and not offload else make_parallel_model
    made = make(config, tokenizer.vocabulary_size, run.model, device, degrees)
    if config.model not in BUILT_IN_MODELS:
        check_vocabulary(made.model, max(int(corpus.train.max()), int(corpus.validation.max())))
    if config.calibration and checkpoint is None:
        with same_outcome():
            calibration = load_calibration(config.calibration, Path(config.model))
        seed_scales(made.model, calibration)
    print_line(console, header_text(config, made.model, device, corpus, made.report))
    if made.gathered is not None:
        print_line(console, str(made.gathered))
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    state = TrainState(made.model, make_optimizer(made.model, config), scaler, device, corpus.fingerprint)
    return Trainer(config, state, TrainingData(*batches, tokenizer, read), run, lock, console, made.loss)


def _make_batches(config: Config, corpus: Corpus, share: tuple[int, int]) -> tuple[Batches, Batches]:
    """The batches to train and to evaluate on, of which this rank takes its `share`."""
    draw = RandomBatches if config.sampling == "random" else Batches
    training = draw(corpus.train, config.context, config.batch, config.seed, share)
    return training, Batches(corpus.validation, config.context, config.batch, None, share)


def _check_settings(config: Config) -> tuple[Degrees, torch.device]:
    """The degrees of parallelism and the device, of settings that this machine and its libraries can run."""
    degrees = find_degrees(config.parallel, world_size())
    check_parallel(config, degrees)
    if config.recipe != "auto":
        get_recipe(config.recipe)
    if config.tensorboard:
        event_writer()
    if config.wandb:
        wandb()
    device = own_device(config.device)
    check_async_tp(config, degrees, device)
    return degrees, device


def read_data(config: Config, run: RunFolder, console: Console) -> RunData:
    """The data of a run. Rank 0 reads it for all; every rank of a process group must call this."""

    def read() -> RunData:
        tokenizer, reading = open_data(config, run.model)
        for line in reading.report.lines():
            print_line(console, line)
        corpus = build_corpus(reading.texts, tokenizer, config.context, config.validation_fraction)
        return RunData(tokenizer, reading.report, corpus)

    return on_first(read)
