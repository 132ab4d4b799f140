"""The loop that chooses tokens, one step after another, without a wait of the device for the host.

    logits = prompt;  repeat:  tokens = choose(ids, logits);  logits = step(tokens);  read what the choice was

A step is queued before the host reads the tokens that it starts from, so the device always has work: the host reads,
streams and decides to stop while the step runs. When all sequences have ended, the step already queued is dropped.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

Choose = Callable[[Tensor, Tensor], Tensor]
Step = Callable[[Tensor], Tensor]


class Stop(NamedTuple):
    """When sequences end.

    Attributes:
        ended: takes the ids [B, n] and returns a boolean [B], True for each sequence that its last token has ended.
        pad: token that fills the row of a sequence that has ended.
    """

    ended: Callable[[Tensor], Tensor]
    pad: Tensor | int


class Mail:
    """The tokens of a step on their way to the host: a copy that the host waits for when it reads."""

    def __init__(self, batch: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.box = torch.empty(batch + 1, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self.event = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def send(self, tokens: Tensor, running: Tensor) -> None:
        self.box.copy_(torch.cat((tokens, running.any().view(1).long())), non_blocking=True)
        if self.event is not None:
            self.event.record()

    def read(self) -> tuple[Tensor, bool]:
        """The tokens [B], and whether a sequence goes on."""
        if self.event is not None:
            self.event.synchronize()
        return self.box[:-1].clone(), bool(self.box[-1])


def decode(
    prompts: Tensor, new: int, logits: Tensor, choose: Choose, step: Step, stop: Stop | None, watched: bool
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Choose up to `new` tokens for each prompt, until all sequences have ended.

    Args:
        prompts: int64 [B, T] on the device, with T >= 1.
        new: number of tokens.
        logits: [B, V] after the prompts.
        choose: takes ids [B, n] and logits [B, V] and returns the next tokens, int64 [B].
        step: takes tokens [B] and returns the logits after them; it may overwrite those that it returned before.
        stop: when sequences end; None lets all have `new` tokens.
        watched: whether the caller reads the tokens. If not, and without `stop`, nothing waits for the device.

    Yields:
        All ids so far, int64 [B, n], and the last tokens [B] on the host, or None if the caller does not read them.
    """
    batch, begin = prompts.shape
    ids = torch.empty(batch, begin + new, dtype=torch.int64, device=prompts.device)
    ids[:, :begin] = prompts
    running = torch.ones(batch, dtype=torch.bool, device=ids.device)
    mail = Mail(batch, ids.device) if watched or stop is not None else None
    for n in range(begin + 1, ids.shape[1] + 1):
        tokens = choose(ids[:, : n - 1], logits)
        if stop is not None:
            tokens = torch.where(running, tokens, stop.pad)
        ids[:, n - 1] = tokens
        if stop is not None:
            running = running & ~stop.ended(ids[:, :n])
        if mail is not None:
            mail.send(tokens, running)
        if n < ids.shape[1]:
            logits = step(tokens)
        if mail is None:
            yield ids[:, :n], None
            continue
        read, goes_on = mail.read()
        yield ids[:, :n], read
        if not goes_on:
            return
