"""The text that a run prints before its first step: the model, the data, the schedule and the precision."""

import torch
from torch import nn

from octavo.models import BUILT_IN_MODELS
from octavo.nn import Conversion
from octavo.train.config import Config
from octavo.train.data import Corpus
from octavo.train.mesh import find_degrees
from octavo.train.ranks import world_size
from octavo.words import plural


def header_text(config: Config, model: nn.Module, device: torch.device, corpus: Corpus, report: Conversion) -> str:
    """The text to print: one line for each of model, data, steps, rate, device and folder, then the conversion."""
    size = sum(p.numel() for p in model.parameters())
    kind = "trained from random weights" if config.model in BUILT_IN_MODELS else "fine-tuned from its weights"
    each = config.batch * config.accumulate * config.context
    epochs = config.steps * each / len(corpus.train)
    decay = f" at step {config.decay_steps}" if config.decay_steps != config.steps else ""
    lines = {
        "model": f"{config.model}, {size:,} parameters, {kind}",
        "data": f"{_sources(config)}: {len(corpus.train):,} tokens to train on, {len(corpus.validation):,} held out",
        "steps": f"{plural(config.steps, 'step')} of {plural(each, 'token')}, {epochs:.2g} of the training tokens",
        "rate": f"{config.learning_rate:g} to {config.min_learning_rate:g}{decay} ({config.schedule}), after "
        f"{plural(config.warmup, 'step')} of warmup",
        "device": f"{device}, {config.precision} outside of FP8",
        **({"ranks": _degrees(config)} if world_size() > 1 else {}),
        "folder": config.out,
    }
    return "\n".join([*(f"{label:<8}{text}" for label, text in lines.items()), report.summary()])


def _degrees(config: Config) -> str:
    degrees = vars(find_degrees(config.parallel, world_size()))
    return ", ".join([str(world_size()), *(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)])


def _sources(config: Config) -> str:
    if config.data == ("stdlib",):
        return "stdlib, the source code of Python's standard library (another text: --data PATH)"
    return ", ".join(config.data)
