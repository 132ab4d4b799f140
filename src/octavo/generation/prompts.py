"""Prompts of a batch: token ids that end at the same place, with padding on the left of the shorter ones."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Prompts(NamedTuple):
    """The prompts of a batch.

    Attributes:
        ids: int64 [B, T], on the device of the model.
        padding: the number of tokens on the left of each row that are padding.
    """

    ids: Tensor
    padding: tuple[int, ...]

    @property
    def shortest(self) -> int:
        """The number of tokens of the shortest prompt."""
        return self.ids.shape[1] - max(self.padding)


def pad_prompts(prompts: Sequence[Sequence[int]], device: torch.device) -> Prompts:
    """The prompts as a batch, padded on the left with token 0.

    Raises:
        ValueError: there is no prompt, or one has no token.
    """
    if len(prompts) == 0:  # a tensor of ids is a sequence too
        raise ValueError("at least one prompt is required, got none")
    if empty := [i for i, prompt in enumerate(prompts) if len(prompt) == 0]:
        raise ValueError(f"a prompt must hold at least one token, prompt {empty[0] + 1} of {len(prompts)} is empty")
    longest = max(map(len, prompts))
    rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    ids = torch.tensor(rows, dtype=torch.int64, device=device)
    return Prompts(ids, tuple(longest - len(prompt) for prompt in prompts))


def read_prompts(ids: Tensor, mask: Tensor | None, device: torch.device) -> Prompts:
    """The prompts of token ids [B, T] and their attention mask [B, T], as transformers passes them.

    Raises:
        ValueError: there is no prompt, or one has no token, or the mask has zeros that are not padding on the left.
    """
    if ids.shape[0] == 0:
        raise ValueError(f"at least one prompt is required, got input_ids of shape {list(ids.shape)}")
    if ids.shape[1] == 0:
        raise ValueError("a prompt must hold at least one token, got input_ids of length 0")
    if mask is None:
        return Prompts(ids.to(device), (0,) * ids.shape[0])
    seen = mask.cpu().bool()
    padding = seen.int().argmax(1)
    wrong = seen.sum(1) != seen.shape[1] - padding
    if seen.shape != ids.shape or bool(wrong.any()):
        row = int(wrong.int().argmax())
        raise ValueError(
            f"a batch of prompts needs padding on the left only, and row {row} of attention_mask {list(mask.shape)} "
            f"for input_ids {list(ids.shape)} is not zeros, then ones: tokenize with tokenizer.padding_side = 'left'"
        )
    return Prompts(ids.to(device), tuple(padding.tolist()))


def shared_prefix(prompts: Prompts) -> int:
    """The number of tokens with which all prompts begin, less than the number of tokens of the shortest."""
    ids, shortest = prompts.ids.cpu(), prompts.shortest
    start = torch.tensor(prompts.padding, device=ids.device)[:, None]
    begin = ids.gather(1, start + torch.arange(shortest, device=ids.device))  # [B, shortest], without padding
    differs = (begin != begin[:1]).any(0)
    return min(shortest - 1, int(differs.int().argmax()) if bool(differs.any()) else shortest)


def first_tokens(prompts: Prompts) -> Tensor:
    """The first token of each row that is not padding, int32 [B]."""
    return torch.tensor(prompts.padding, dtype=torch.int32, device=prompts.ids.device)
