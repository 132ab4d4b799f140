"""The loss of a language model on text that it was not trained on.

loss = mean over tokens of -log p(token | tokens before it)        perplexity = exp(loss)
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from octavo.train.data import Batches
from octavo.train.loss import Loss, whole_loss

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """A context in which a model computes in `precision`: bf16 or fp16 by autocast, or fp32 without it."""
    dtype = AUTOCAST.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


@contextmanager
def own_random(device: torch.device) -> Iterator[None]:
    """Draw random numbers from a fixed seed within the block, and restore the run's random state after it."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def next_token_loss(
    model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device, precision: str, loss: Loss = whole_loss
) -> Tensor:
    """The mean cross-entropy, 0-dim, of a batch (inputs, targets), each int64 [B, T]."""
    inputs, targets = (_send(part, device) for part in batch)
    with autocast(precision, device):
        return loss(model, inputs, targets)


def _send(part: Tensor, device: torch.device) -> Tensor:
    if part.device.type != "cpu" or device.type != "cuda":
        return part.to(device)
    # A copy from memory that is not pinned would make the host wait for all earlier work of the GPU.
    return part.pin_memory().to(device, non_blocking=True)


@torch.no_grad()
def mean_loss(
    model: nn.Module,
    batches: Batches,
    device: torch.device,
    *,
    precision: str,
    count: int | None,
    loss: Loss = whole_loss,
) -> tuple[float, int]:
    """The mean loss over batches, and the number of tokens that were predicted.

    Args:
        model: in evaluation mode, on `device`.
        batches: of the text.
        device: where the batches go.
        precision: as of `autocast`.
        count: the batches to take; None, or a number above all of them, takes each whole batch once.
        loss: of a batch.
    """
    whole = max(batches.sequences // batches.batch, 1)
    count = whole if count is None else min(count, whole)
    with own_random(device):
        losses = [next_token_loss(model, batches.at(index), device, precision, loss) for index in range(count)]
    return float(torch.stack(losses).mean()), count * batches.batch * batches.context
