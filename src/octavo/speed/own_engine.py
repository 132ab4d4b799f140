"""Octavo's engine with a model that is not packed: a run of octavo train in its recipe, or a model in BF16."""

from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octavo.artifact.run import RunFolder
from octavo.generation import Sampling
from octavo.generation.own_cache import open_engine
from octavo.hf.outputs import model_outputs
from octavo.nn import cast_once
from octavo.runtime.folders import open_model
from octavo.speed.grid import Grid
from octavo.speed.programs import OCTAVO, Opened, Program
from octavo.train.evaluation import autocast
from octavo.train.finished import open_run


class _Model(NamedTuple):
    """A model, the tokens that it sees, and the precision of autocast that it runs in."""

    model: nn.Module
    context: int
    precision: str


def engine_program(folder: Path, grid: Grid, device: torch.device) -> Program:
    """The engine as `octavo generate` calls it. Its reference computes the whole text again for each token."""

    def open_folder() -> Opened:
        model, context, precision = _open(folder, device)
        tokens = max(grid.prompts) + grid.tokens
        engine, stack = open_engine(model, context=context, tokens=tokens), ExitStack()
        stack.enter_context(cast_once(model))

        def generate(ids: Tensor, tokens: int) -> Tensor:
            with autocast(precision, device):
                steps = list(engine.generate(ids.tolist(), tokens, Sampling(temperature=0)))
            return torch.tensor(steps).t()

        def without_cache(ids: Tensor, tokens: int) -> Tensor:
            text = ids
            with torch.inference_mode(), autocast(precision, device):
                for _ in range(tokens):
                    best = model_outputs(model, text, logits=True)[:, -1].argmax(-1, keepdim=True)
                    text = torch.cat((text, best), 1)
            return text[:, ids.shape[1] :]

        def forget() -> None:
            engine.sessions.clear()

        return Opened({OCTAVO: generate}, without_cache, "the model without a cache", forget, stack.close)

    return Program(OCTAVO, (OCTAVO,), folder, open_folder)


def _open(folder: Path, device: torch.device) -> _Model:
    if RunFolder(folder).has_model:
        run = open_run(folder, None, str(device))
        return _Model(run.model, run.config.context, run.config.precision)
    loaded = open_model(folder, device)
    return _Model(loaded.model, loaded.context, "fp32")
