"""Prompts: the token ids that a model runs on when it is calibrated, packed within a budget, or verified.

A prompt is what the model would see in service. It carries the tokenizer's special tokens (the first token of a
sequence has the largest activations: Sun et al. 2024, arXiv:2402.17762) and, for a conversation, the chat template.
A text file is cut into windows of one context each. A row is one prompt, cut after one context.

The choice of prompts depends on their text and the seed, not on file names. Documents, and the windows of each, are
sorted by a keyed hash. Every document gives its share before any gives more.
"""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.checkpoint.files import ArtifactError
from octavo.data import DataError, Document, ReadReport, chat_of, read_text
from octavo.models.tokenizer import open_tokenizer
from octavo.util import of_input

OnRead = Callable[[ReadReport], None]
"""Called with the report of the text that was read, before a model runs on it."""


@dataclass(frozen=True)
class PromptOptions:
    """Which prompts are taken from text.

    Attributes:
        samples: how many prompts; fewer where the text has no more.
        context: the most tokens of a prompt. The context of the model and of its tokenizer limit it as well.
        batch: prompts that run at once.
        seed: of the choice.

    Raises:
        ValueError: a number is out of range.
    """

    samples: int = 64
    context: int = 512
    batch: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1 or self.context < 1 or self.batch < 1 or self.seed < 0:
            given = ", ".join(f"{name} {value}" for name, value in asdict(self).items())
            raise ValueError(f"samples, context and batch must be at least 1 and seed at least 0, got {given}")


@dataclass(frozen=True, eq=False)
class Prompts:
    """The prompts that a model runs on."""

    ids: tuple[tuple[int, ...], ...]  # of each prompt, longest first, so that neighbours make batches of one length
    report: ReadReport  # of the text that was read and skipped
    context: int  # the most tokens that a prompt could have

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.ids).encode()).hexdigest()

    def batches(self, size: int, shortest: int = 1) -> list[Tensor]:
        """Batches int64 [B, T] of at most `size` prompts of one length, `shortest` or more, without padding."""
        if len(self.ids[0]) < shortest:
            raise DataError("every prompt is one token long, so that no token follows another: give longer texts")
        by_length = [torch.tensor([*ids]) for length, ids in groupby(self.ids, len) if length >= shortest]
        return [batch for ids in by_length for batch in torch.split(ids, size)]


def open_prompts(
    data: Sequence[str], folder: Path, options: PromptOptions, model: Any, on_read: OnRead | None = None
) -> Prompts:
    """The prompts for a `model` (an `octavo.hf.meta_model.MetaModel`), from `data` and the tokenizer in `folder`."""
    most = model.context  # first: a model of images need not have a tokenizer
    tokenizer = open_tokenizer(folder)
    context = min(options.context, tokenizer.model_max_length, most)
    prompts = read_prompts(data, tokenizer, replace(options, context=context))
    if on_read is not None:
        on_read(prompts.report)
    if (largest := max(map(max, prompts.ids))) >= (rows := model.require_text().num_embeddings):
        raise ArtifactError(
            f"the tokenizer in {folder} gives the id {largest}, the model has {rows} embeddings: the tokenizer is of "
            "another model"
        )
    return prompts


def read_prompts(data: Sequence[str], tokenizer: Any, options: PromptOptions) -> Prompts:
    """The prompts that `options` choose from the text of `data`; the tokenizer's own limit does not count."""
    samples, context, seed = options.samples, options.context, options.seed
    reading = read_text(data, chat_of(tokenizer))
    cutter = _Cutter(tokenizer, context)
    documents = {_key(seed, document.text): document for document in reading.documents}  # drops repetitions
    share = math.ceil(samples / max(len(documents), 1))
    chosen: list[tuple[int, ...]] = []
    more: list[tuple[int, ...]] = []
    for key in sorted(documents):
        windows = sorted(cutter.windows(documents[key]), key=lambda ids: _key(seed, ids))
        chosen += windows[:share]
        more += windows[share:]
        if len(chosen) >= samples:
            break
    ids = (chosen + more)[:samples]
    if not ids:
        raise DataError(f"the data must hold at least one prompt; the tokenizer makes no token of {', '.join(data)}")
    return Prompts(tuple(sorted(ids, key=lambda ids: (-len(ids), _key(seed, ids)))), reading.report, context)


class _Cutter:
    """Cuts documents into prompts, with the special tokens of the tokenizer around each."""

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._tokenizer, self._context = tokenizer, context
        try:
            self._encode(probe := "a", special=False)
        except DataError:  # the tokenizer has no token for the letter
            probe = str(min(tokenizer.get_vocab()))
        plain, full = self._encode(probe, special=False), self._encode(probe, special=True)
        starts = range(len(full) - len(plain) + 1)
        start = next((i for i in starts if full[i : i + len(plain)] == plain), None)
        if start is None:
            raise DataError(
                f"the tokenizer turns {probe!r} into {list(plain)}, and into {list(full)} with special tokens, "
                "which must contain the former"
            )
        self._before, self._after = full[:start], full[start + len(plain) :]
        self._room = context - len(self._before) - len(self._after)
        if self._room < 1:
            raise DataError(f"a context of {context} tokens has no room beside the special tokens: give a larger one")

    def windows(self, document: Document) -> list[tuple[int, ...]]:
        ids = self._encode(document.text, special=False)
        if document.kind == "chat":  # The chat template wrote the special tokens.
            return [ids[: self._context]]
        stop = len(ids) if document.kind == "text" else min(len(ids), self._room)
        return [self._before + ids[i : i + self._room] + self._after for i in range(0, stop, self._room)]

    def _encode(self, text: str, special: bool) -> tuple[int, ...]:
        try:
            # verbose=False: a text longer than the model's context is cut here, and needs no warning.
            encoded = self._tokenizer(text, add_special_tokens=special, return_attention_mask=False, verbose=False)
        except BaseException as error:  # `tokenizers` raises an Exception where there is no unknown token
            if not of_input(error):
                raise
            unknown = sorted(set(text) - self._tokenizer.get_vocab().keys())
            raise DataError(
                f"the tokenizer cannot encode {text[:40]!r} ({error}); it has no token for "
                f"{', '.join(map(repr, unknown[:8]))}{', ...' * (len(unknown) > 8)}"
            ) from error
        return tuple(encoded["input_ids"])


def _key(seed: int, content: str | tuple[int, ...]) -> bytes:
    text = content if isinstance(content, str) else json.dumps(content)
    return hashlib.sha256(f"{seed} {text}".encode()).digest()
