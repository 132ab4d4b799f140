"""Programs without a model, for comparisons of speed."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from octavo.speed import Opened, Program


def counting(ids: Tensor, tokens: int) -> Tensor:
    """New tokens 0, 1, 2, ..."""
    return torch.arange(tokens).expand(len(ids), -1)


def too_large(largest: int) -> Callable[[Tensor, int], Tensor]:
    """`counting`, whose memory is exhausted by more than so many prompts."""

    def generate(ids: Tensor, tokens: int) -> Tensor:
        if len(ids) > largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB\nmore lines")
        return counting(ids, tokens)

    return generate


def program(
    folder: Path, name: str, generate: Callable[[Tensor, int], Tensor] = counting, **settings: object
) -> Program:
    """A program with one way of its own name."""
    reference = settings.pop("reference", None)
    return Program(name, (name,), folder, lambda: Opened({name: generate}, reference), **settings)  # type: ignore[arg-type]


def unopened(folder: Path, name: str, error: Exception, **settings: bool) -> Program:
    """A program that cannot open its folder."""

    def fail() -> Opened:
        raise error

    return Program(name, (name,), folder, fail, **settings)
