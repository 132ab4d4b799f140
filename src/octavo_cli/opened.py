"""Opening the model of a command: a run of octavo train, a packed folder, or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import nn

    from octavo.kv_cache.model import Pairs
    from octavo.models.tokenizer import Tokenizer

_SOURCES = "run of octavo train, a folder of octavo pack, or a Hugging Face model folder"
SOURCE_HELP = f"A {_SOURCES}."


class Opened(NamedTuple):
    """A language model in evaluation mode, with its tokenizer, context, device and precision.

    `precision` is that of autocast, as training has it. `description` is the folder of its config.json and tokenizer.
    `kv_scales` are the scales of keys and values, a pair for each layer, if a packed folder has them.
    """

    model: nn.Module
    tokenizer: Tokenizer
    context: int
    device: torch.device
    precision: str
    description: Path
    title: str
    kv_scales: Pairs | None = None


def open_source(source: Path, step: int | None, device: str) -> Opened:
    """Open a model. A run's model computes in the recipe and the precision that it was trained in.

    Raises:
        FileNotFoundError, ArtifactError: the folder is none of these, or is incomplete.
        ValueError: a step of a folder that is no run, or a device that is not there.
    """
    from octavo.artifact.run import RunFolder, check_config
    from octavo.device import choose_device
    from octavo.runtime.folders import open_model
    from octavo.train.finished import open_run

    check_config(source, f"a {_SOURCES}")
    if RunFolder(source).has_model:
        run = open_run(source, step, device)
        title = f"{source}, step {run.step}, {run.config.recipe}"
        folder = RunFolder(source).model
        return Opened(run.model, run.tokenizer, run.config.context, run.device, run.config.precision, folder, title)
    if step is not None:
        raise ValueError(f"{source} is a model, not a run of octavo train: it has no steps")
    loaded, place = open_model(source, device), choose_device(device)
    return Opened(loaded.model, loaded.tokenizer, loaded.context, place, "fp32", source, str(source), loaded.kv_scales)
