"""Start a run, or take one up again: everything between the settings and the first step."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from octavo.artifact.run import RunFolder
from octavo.nn import convert
from octavo.recipe import get_recipe
from octavo.train.checkpoint import TrainState, load_checkpoint
from octavo.train.config import Config, ConfigError
from octavo.train.data import Batches, build_corpus, load_texts
from octavo.train.loop import Trainer
from octavo.train.model import make_model, make_tokenizer, save_description
from octavo.train.optimizer import make_optimizer


def start(config: Config, console: Console) -> Trainer:
    """A new run in `config.out`, at step 0.

    Raises:
        ConfigError, DataError: settings or data that cannot be trained on; nothing was written then.
        FileExistsError: `config.out` holds a run already.
    """
    run = RunFolder(Path(config.out))
    if run.config.exists():
        raise FileExistsError(
            f"{run.path} holds a run already: resume it with --resume {run.path}, or choose another --out"
        )
    trainer = _prepare(config, run, console)
    run.path.mkdir(parents=True, exist_ok=True)
    save_description(trainer.model, trainer.tokenizer, config, run.model)
    run.config.write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    return trainer


def resume(path: Path, overrides: Sequence[str], console: Console) -> Trainer:
    """The run in the folder `path`, at its newest checkpoint; `overrides` are settings that change, as --key value.

    Raises:
        ArtifactError: no run, no checkpoint, or one that is not whole or does not fit.
    """
    run = RunFolder(path)
    newest = run.newest()
    config = Config.from_dict(json.loads(run.config.read_text()) | {"out": str(path)}).replace(overrides)
    trainer = _prepare(config, run, console)
    load_checkpoint(newest, trainer.state)
    run.config.write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    console.print(f"resumed from {newest}", highlight=False)
    return trainer


def _prepare(config: Config, run: RunFolder, console: Console) -> Trainer:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("octavo train runs as one process for now: start it without torchrun")
    get_recipe(config.recipe)
    device = choose_device(config.device)
    torch.use_deterministic_algorithms(config.deterministic)
    texts = load_texts(config.data)
    tokenizer = make_tokenizer(config, texts, run.model)
    corpus = build_corpus(texts, tokenizer, config.context, config.validation_fraction)
    training = Batches(corpus.train, config.context, config.batch, config.seed)
    validation = Batches(corpus.validation, config.context, config.batch, None)
    torch.manual_seed(config.seed)
    model = make_model(config, tokenizer.vocabulary_size, run.model).to(device)
    report = convert(model, config.recipe, skip=config.skip, emulate=config.emulate)
    size = sum(p.numel() for p in model.parameters())
    console.print(
        f"{config.model}: {size / 1e6:.2f}M parameters on {device}, {config.precision}; "
        f"{len(corpus.train) / 1e6:.2f}M training tokens\n{report.summary()}",
        highlight=False,
    )
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    state = TrainState(model, make_optimizer(model, config), scaler, device, corpus.fingerprint)
    return Trainer(config, state, training, validation, tokenizer, run, console)


def choose_device(name: str) -> torch.device:
    """The device called `name`; "auto" is the GPU where there is one. A ConfigError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"device {name} was asked for, but this torch ({torch.__version__}) sees no GPU: use --device cpu"
        )
    return torch.device(name)
