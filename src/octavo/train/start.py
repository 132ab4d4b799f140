"""Starting and resuming a run: all work between the settings and the first step."""

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch import nn

from octavo.calibration.calibrator import load_calibration
from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.folder import check_links, locked_folder, writing
from octavo.checkpoint.run import RunFolder
from octavo.data import DataError, ReadReport, absolute_source
from octavo.models import BUILT_IN_MODELS
from octavo.models.tokenizer import Tokenizer
from octavo.nn import Conversion
from octavo.recipe import get_recipe
from octavo.scales import seed_scales
from octavo.train.config import Config, ConfigError, read_settings, write_settings
from octavo.train.corpus import Batches, Corpus, RandomBatches, build_corpus, open_data
from octavo.train.model import (
    allow_compilations,
    check_folder,
    check_memory,
    check_parallel,
    check_vocabulary,
    make_meta_model,
    make_trained_model,
    positions_of,
    save_description,
)
from octavo.train.optimizer import make_optimizer
from octavo.train.processes import (
    check_same,
    gather,
    group_of_one,
    on_first,
    own_device,
    rank,
    same_outcome,
    world_size,
)
from octavo.train.saving import TrainState, disturb_weights, load_checkpoint, load_into_other_recipe, open_checkpoint
from octavo.train.settings import find_degrees
from octavo.train.step_metrics import event_writer, print_line, wandb
from octavo.train.supervision import apply_promotions
from octavo.train.trainer import Trainer, TrainingData
from octavo.util import hub_hint, plural


def start_run(config: Config, console: Console) -> Trainer:
    """A new run in `config.out`, at step 0 or, of a branch, at that of the checkpoint.

    The run's folder is locked until `Trainer.run` ends. Every rank must call this; an error of one is raised on all.
    Before an error of the settings or the data nothing has been written.
    """
    check_same(config)
    run = RunFolder(Path(config.out))
    with ExitStack() as stack:
        with same_outcome():
            if rank() == 0:
                stack.enter_context(locked_folder(run.path))
                _check_empty(run)
            config = settle(config)
        trainer = prepare_run(config, run, stack, console, Path(config.branch) if config.branch else None)
        if config.branch:
            load_into_other_recipe(Path(config.branch), trainer.state)
            if config.disturb:
                disturb_weights(trainer.model, config.disturb, config.seed)
            print_line(console, f"branches from {config.branch}")
        if (step := trainer.state.step) >= config.steps:
            raise ConfigError(
                f"steps must be above the {step} of {config.branch}; got {config.steps}: give more --steps"
            )
        with same_outcome():
            if rank() == 0:
                _describe(trainer)
        trainer.lock = stack.pop_all()
    return trainer


def resume_run(path: Path, overrides: Sequence[str], console: Console) -> Trainer:
    """The run in the folder `path`, at its newest checkpoint; `overrides` are settings that change, as --key value.

    The run's folder is locked until `Trainer.run` ends. Every rank must call this; an error of one is raised on all.
    """
    run = RunFolder(path)
    with ExitStack() as stack:
        with same_outcome():
            run.check()
            if rank() == 0:
                stack.enter_context(locked_folder(path))
            newest = run.newest()
            config = _absolute_paths(read_settings(run).replace(overrides))
            if config.out != str(path):
                raise ConfigError(f"a resumed run stays in its folder {path}; got --out {config.out}: leave it out")
            if (step := run.step_of(newest)) > config.steps:
                done = f"the {step} that the run {path} has done"
                raise ConfigError(f"steps must be at least {done}; got {config.steps}: give more --steps")
        check_same(config)
        trainer = prepare_run(config, run, stack, console, newest)
        apply_promotions(trainer.model, trainer.actions.promotions)
        allow_compilations(len(trainer.actions.promotions))
        load_checkpoint(newest, trainer.state)
        if rank() == 0:
            write_settings(config, run)
        ended = f", the last of its {plural(step, 'step')}: --steps N goes on" if step == config.steps else ""
        print_line(console, f"resumed from {newest}{ended}")
        trainer.lock = stack.pop_all()
    return trainer


def branch_settings(checkpoint: Path, overrides: Sequence[str]) -> Config:
    """The settings of the run of a checkpoint with `overrides`, for a branch, which is not disturbed again."""
    run = RunFolder(checkpoint.parent)
    run.check()
    if checkpoint.name not in (kept := [path.name for path in run.checkpoints()]):
        raise ArtifactError(f"{run.path} has no checkpoint {checkpoint.name}: it keeps {', '.join(kept) or 'none'}")
    return read_settings(run).change(disturb=0.0).replace(overrides)


def settle(config: Config) -> Config:
    """The settings that a new run writes down: with absolute paths, and a context, if not given, that the model has."""
    if config.model in BUILT_IN_MODELS:
        return _absolute_paths(config)
    if not Path(config.model).is_dir():
        names, hint = ", ".join(BUILT_IN_MODELS), hub_hint(config.model)
        raise ConfigError(f"model must be {names} or a local Hugging Face folder; {config.model} is none{hint}")
    folder = Path(config.model).resolve()
    if RunFolder(folder).has_model:
        raise ConfigError(f"{folder} is a run of octavo train: continue it with --resume, or give another --model")
    check_folder(folder, config.model)
    check_links(folder)
    context = {"context": min(config.context, positions_of(folder))} if "context" in config.derived else {}
    return _absolute_paths(config.change(model=str(folder), **context))


def _absolute_paths(config: Config) -> Config:
    """The settings with data sources and folders that mean the same from another working directory."""
    folders = {name: str(Path(path).resolve()) for name in ("calibration", "branch") if (path := getattr(config, name))}
    return config.change(data=tuple(map(absolute_source, config.data)), **folders)


def _check_empty(run: RunFolder) -> None:
    if run.path.exists() and not run.path.is_dir():
        raise FileExistsError(f"{run.path} is a file: --out must name the folder of the run, which it makes")
    if run.path.exists() and any(run.path.iterdir()):
        advice = f"resume it with --resume {run.path}, or" if run.checkpoints() else "it has no checkpoint, so"
        raise FileExistsError(f"{run.path} is not empty: {advice} choose another --out")


def _describe(trainer: Trainer) -> None:
    """Write the settings of a new run and the description of its model to the run's folder."""
    run = trainer.run_folder
    with writing(run.path):
        run.path.mkdir(parents=True, exist_ok=True)
        write_settings(trainer.config, run)  # first: a job that is started again knows the folder by them
        save_description(trainer.model, trainer.data.tokenizer, trainer.config, run.model)


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
    """The run of a settled `config` at step 0, of which nothing is written. Every rank must call this.

    `checkpoint`, which the caller will load, is checked before memory is taken. `data` None reads the data.
    """
    with same_outcome():
        degrees = find_degrees(config.parallel, world_size())
        device = own_device(config.device)
        check_parallel(config, degrees, device)
        if config.recipe != "auto":
            get_recipe(config.recipe)
        if config.tensorboard:
            event_writer()
        if config.wandb:
            wandb()
    if config.deterministic:  # cuBLAS reads this when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    tokenizer, read, corpus = read_data(config, run, console) if data is None else data
    draw, share = RandomBatches if config.sampling == "random" else Batches, degrees.share(rank())
    training = draw(corpus.train, config.context, config.batch, config.seed, share)
    if config.batch > training.sequences:
        raise DataError(
            f"batch must be at most the {training.sequences} sequences of {config.context} tokens in the training "
            f"text, got {config.batch}: give more data, or a smaller batch with accumulate"
        )
    batches = training, Batches(corpus.validation, config.context, config.batch, None, share)
    storage = torch.device("cpu") if config.optimizer.offload else device
    check_memory(config, tokenizer.vocabulary_size, storage, degrees.dp_shard * degrees.tp)
    if checkpoint is not None:
        with same_outcome():
            meta_model = make_meta_model(config, tokenizer.vocabulary_size, run.model)
            open_checkpoint(checkpoint, meta_model, corpus.fingerprint)
    torch.manual_seed(config.seed)
    if config.optimizer.offload:
        lock.enter_context(group_of_one())
    made = make_trained_model(config, tokenizer.vocabulary_size, run.model, device, degrees)
    if config.model not in BUILT_IN_MODELS:
        check_vocabulary(made.model, max(each.highest for each in batches))
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


def read_data(config: Config, run: RunFolder, console: Console) -> RunData:
    """The data of a run. Rank 0 reads it for all; every rank of a process group must call this."""

    def read() -> RunData:
        tokenizer, reading = open_data(config, run.model)
        for line in reading.report.lines():
            print_line(console, line)
        corpus = build_corpus(reading.texts, tokenizer, config.context, config.validation_fraction)
        return RunData(tokenizer, reading.report, corpus)

    return on_first(read)


def header_text(config: Config, model: nn.Module, device: torch.device, corpus: Corpus, report: Conversion) -> str:
    """The text before the first step: lines of model, data, steps and the like, then the conversion."""
    size = sum(p.numel() for p in model.parameters())
    kind = "trained from random weights" if config.model in BUILT_IN_MODELS else "fine-tuned from its weights"
    each = config.batch * config.accumulate * config.context
    epochs = config.steps * each / len(corpus.train)
    decay = f" at step {config.decay_steps}" if config.decay_steps != config.steps else ""
    text = ", ".join(config.data)
    if config.data == ("stdlib",):
        text = "stdlib, the source code of Python's standard library (another text: --data PATH)"
    lines = {
        "model": f"{config.model}, {size:,} parameters, {kind}",
        "data": f"{text}: {len(corpus.train):,} tokens to train on, {len(corpus.validation):,} held out",
        "steps": f"{plural(config.steps, 'step')} of {plural(each, 'token')}, {epochs:.2g} of the training tokens",
        "rate": f"{config.learning_rate:g} to {config.min_learning_rate:g}{decay} ({config.schedule}), after "
        f"{plural(config.warmup, 'step')} of warmup",
        "device": f"{device}, {config.precision} outside of FP8",
    }
    if (ranks := world_size()) > 1:
        degrees = vars(find_degrees(config.parallel, ranks))
        lines["ranks"] = ", ".join([str(ranks), *(f"{name} {n}" for name, n in degrees.items() if n > 1)])
    lines["folder"] = config.out
    return "\n".join([*(f"{label:<8}{text}" for label, text in lines.items()), report.summary()])


# ---- Continuing a run whose job is started again with the same command, by torchrun after a failure or by a scheduler.


def was_restarted() -> bool:
    """True if torchrun has started the job again, because a process failed. Every rank must call this."""
    return any(gather(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0))


def start_or_resume(config: Config, console: Console) -> Trainer:
    """The run in `config.out` at its newest checkpoint; a new run if the folder has none. Every rank must call this."""
    resumes = on_first(lambda: _has_checkpoint(config))  # before the others write to the folder
    return resume_run(Path(config.out), (), console) if resumes else start_run(config, console)


def _has_checkpoint(config: Config) -> bool:
    """True if the folder of the run has a checkpoint. The files of a run without one are removed."""
    run = RunFolder(Path(config.out))
    if not run.config.is_file():
        return False
    found, given = read_settings(run).to_dict(), settle(config).to_dict()
    for name, value in given.items():
        if name != "out" and found.get(name) != value:
            raise ConfigError(
                f"{run.path} holds a run with other settings: {name} is {found.get(name)!r} there, and {value!r} here. "
                f"Continue that run with --resume {run.path}, or choose another --out"
            )
    if run.checkpoints():
        return True
    with locked_folder(run.path):
        shutil.rmtree(run.path)
    return False
