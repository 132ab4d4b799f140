"""The loss of a language model on a batch of token ids.

    loss = mean over tokens of -log p(token | tokens before it)        perplexity = exp(loss)

`whole_loss` computes all logits, and `chunked_loss` those of some tokens at a time. The gradient of a mixture includes
that of its balance loss; the value of the loss does not.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.models.decoder import logits_of
from octavo.models.mixture import Mixture
from octavo.models.tokenizer import Batches
from octavo.nn.fused_loss import Head, Task, computing_loss
from octavo.util import Progress, no_progress

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def whole_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy, 0-dim, of int64 inputs and targets, each [B, T]; logits and sums in float32."""
    predicted = logits_of(model(inputs))
    return _balanced(F.cross_entropy(predicted.flatten(0, 1).float(), targets.flatten()), model)


def _balanced(loss: Tensor, model: nn.Module) -> Tensor:
    """`loss`, with the gradient of the balance loss of a mixture added to its own."""
    balance = model.take_balance() if isinstance(model, Mixture) else None
    return loss if balance is None else loss + (balance - balance.detach())


def chunked_loss(head: Head, chunk: int, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of `whole_loss`, with the logits of `chunk` tokens in memory at a time (`octavo.nn.fused_loss`)."""
    with computing_loss(model, head, Task(targets), chunk):
        return _balanced(model(inputs), model)


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
    model: nn.Module, batch: tuple[Tensor, Tensor], device: torch.device, precision: str, loss: Loss
) -> Tensor:
    """The mean cross-entropy, 0-dim, of a batch (inputs, targets), each int64 [B, T]."""
    # A copy from memory that is not pinned would make the host wait for all earlier work of the GPU.
    pins = device.type == "cuda" and not batch[0].is_cuda
    inputs, targets = ((part.pin_memory() if pins else part).to(device, non_blocking=True) for part in batch)
    with autocast(precision, device):
        return loss(model, inputs, targets)


@torch.no_grad()
def mean_loss(
    model: nn.Module,
    batches: Batches,
    device: torch.device,
    loss: Loss,
    *,
    precision: str,
    count: int | None,
    progress: Progress = no_progress,
) -> tuple[float, int]:
    """The mean loss over `count` batches (None: every sequence once), and the number of tokens that were predicted. No
    sequence is taken twice. Of batches that several ranks share, the loss is the mean of what the ranks return."""
    whole, rest = divmod(batches.sequences, batches.batch)  # the last `rest` sequences fill no batch
    rest = rest if count is None or not whole else 0
    count = whole if count is None else min(count, whole)
    with own_random(device):
        losses = []
        for index in range(count):
            losses.append(next_token_loss(model, batches.at(index), device, precision, loss))
            progress(index + 1, count, "evaluating")
        mean = float(torch.stack(losses).mean()) if losses else 0.0
        if rest:
            inputs, targets = batches.at(count)
            own = min(max(rest - batches.first, 0), batches.size)
            part = slice(max(own, 1))  # a rank without one of them takes part in the exchanges of the others
            last = float(next_token_loss(model, (inputs[part], targets[part]), device, precision, loss))
            mean += (last * (own * batches.batch / batches.size / rest) - mean) * rest / batches.sequences
    return mean, (count * batches.batch + rest) * batches.context
