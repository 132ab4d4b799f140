"""The text that a language model is trained on, in batches of token ids, and the loss of a batch.

    loss = mean over tokens of -log p(token | tokens before it)        perplexity = exp(loss)

`whole_loss` computes all logits, and `ChunkedLoss` those of some tokens at a time. The gradient of a mixture includes
that of its balance loss; the value of the loss does not.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.data import DataError, Reading, read_text
from octavo.models import BUILT_IN_MODELS
from octavo.models.decoder import logits_of
from octavo.models.mixture import Mixture
from octavo.models.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    CharacterTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
)
from octavo.nn.fused_loss import Head, Task, computing_loss, find_head
from octavo.train.config import Config, ConfigError

# ---- Text to batches of token ids, where one integer is the position in the data.
#
# Documents are sorted by a hash of their content. That order is as good as a shuffle, and it is the same on every
# machine, whatever the files are called. The documents are tokenized and laid end to end, and the last share is held
# out for validation. A sequence is `context` consecutive tokens, and its targets are those one further on. An epoch
# visits each sequence once, in a permutation drawn from a counter-based generator keyed by (seed, epoch) (Philox:
# Salmon et al., SC 2011, "Parallel random numbers: as easy as 1, 2, 3"). Batch `i` depends on `i` and the seed alone.


HUB = "hf:"  # before the name of a tokenizer
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


def open_data(config: Config, saved: Path) -> tuple[Tokenizer, Reading]:
    """The tokenizer of a new run, or the one that a resumed run has `saved`, and the texts that `config` names."""
    opened: Tokenizer | None = None
    if config.tokenizer.startswith(HUB) and not saved.exists():
        opened = HuggingFaceTokenizer.from_hub(config.tokenizer.removeprefix(HUB))
    elif config.tokenizer.startswith(HUB) or config.model not in BUILT_IN_MODELS:
        opened = HuggingFaceTokenizer(saved if saved.exists() else config.model)
    elif saved.exists():
        opened = load_tokenizer(saved)
    reading = read_text(config.data, opened.chat if opened else None)
    if opened is None and config.tokenizer == "bpe":
        opened = BpeTokenizer.train(reading.texts, config.vocabulary)
    elif opened is None:
        opened = CharacterTokenizer.train(reading.texts) if config.tokenizer == "characters" else ByteTokenizer()
    return opened, reading


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenized text in two parts, arrays [T] of uint16 up to 65,536 tokens of vocabulary, and of uint32 above."""

    train: Tokens
    validation: Tokens
    fingerprint: str  # SHA-256 of the ids and of the position of the split


def build_corpus(texts: Iterable[str], tokenizer: Tokenizer, context: int, validation_fraction: float) -> Corpus:
    """Order, tokenize and split `texts`; each part gets at least one sequence, `context` + 1 tokens, or a DataError.

    The split is at the end of the document that is nearest to the requested fraction of tokens. If no end of a document
    leaves a sequence to both parts (there may be one document only), the split is at the requested token itself.
    """
    tokens, ends = lay_out(texts, tokenizer)
    split = _split(ends, len(tokens), context + 1, validation_fraction)
    fingerprint = hashlib.sha256(f"{split} {tokens.dtype.name} ".encode())
    fingerprint.update(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).data)
    return Corpus(tokens[:split], tokens[split:], fingerprint.hexdigest())


def lay_out(texts: Iterable[str], tokenizer: Tokenizer) -> tuple[Tokens, npt.NDArray[np.int64]]:
    """The tokens of `texts`, ordered and end to end as in a corpus, and where each document ends among them."""
    # A newline ends each document, so that no two run into one line.
    documents = [text if text.endswith("\n") else text + "\n" for text in texts if text]
    documents.sort(key=lambda text: hashlib.sha256(text.encode("utf-8")).digest())
    ids = tokenizer.encode_batch(documents)
    ends = np.cumsum([len(document) for document in ids], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    dtype: type[Any] = np.uint16 if tokenizer.vocabulary_size <= 1 << 16 else np.uint32
    tokens = np.empty(total, dtype)
    for end, document in zip(ends, ids, strict=True):
        tokens[end - len(document) : end] = document
    return tokens, ends


def _split(ends: npt.NDArray[np.int64], total: int, sequence: int, fraction: float) -> int:
    target = total - round(total * fraction)
    fitting = ends[(ends >= sequence) & (total - ends >= sequence)]
    split = int(fitting[np.argmin(np.abs(fitting - target))]) if len(fitting) else target
    for part, found in (("training", split), ("validation", total - split)):
        if found < sequence:
            raise DataError(
                f"the {part} text must hold one sequence, {sequence} tokens (context + 1); it has {found} of the "
                f"{total} in all, at validation_fraction {fraction}: give more data, a smaller context or another "
                "fraction"
            )
    return split


class Batches:
    """Micro-batches of `tokens`, by index: `sequences` = (len(tokens) - 1) // context sequences without overlap.

    With a `seed`, each epoch is a fresh permutation of them; with None, they come in order (validation). After the last
    sequence of an epoch comes the first of the next, inside a batch too. `share` (index, count): this object gives the
    index-th of count equal shares of each micro-batch of `batch` sequences, which do not depend on it.
    """

    def __init__(
        self, tokens: Tokens, context: int, batch: int, seed: int | None, share: tuple[int, int] = (0, 1)
    ) -> None:
        if context < 1 or batch < 1 or (seed is not None and seed < 0):
            raise ValueError(
                f"context and batch must be at least 1 and seed 0 or more; got context {context}, batch {batch}, "
                f"seed {seed}"
            )
        self.sequences = (len(tokens) - 1) // context
        if self.sequences < 1:
            raise DataError(f"a sequence needs {context + 1} tokens (context + 1); got {len(tokens)}")
        index, count = share
        if batch % count or not 0 <= index < count:
            raise ValueError(f"share must be one of equal parts of a batch of {batch}; got {index} of {count}")
        self.context, self.batch = context, batch
        self.size = batch // count
        self._first = index * self.size
        self._tokens, self._seed = tokens, seed

    @property
    def highest(self) -> int:
        """The highest token."""
        return int(self._tokens.max())

    def at(self, index: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of micro-batch `index`, from 0 without end: int64 [batch / count, context] on the CPU."""
        if index < 0:
            raise ValueError(f"the index of a batch must be 0 or more; got {index}")
        first = index * self.batch + self._first
        starts = self._starts(range(first, first + self.size))[:, None]
        window = self._tokens[starts + np.arange(self.context + 1)].astype(np.int64)  # [size, context + 1]
        pair = torch.from_numpy(window)
        return pair[:, :-1].contiguous(), pair[:, 1:].contiguous()

    def _starts(self, positions: range) -> npt.NDArray[np.int64]:
        """The offsets of the sequences at `positions` of the endless row of sequences."""
        count, seed = self.sequences, self._seed
        rows = [p % count if seed is None else _permutation(seed, p // count, count)[p % count] for p in positions]
        return np.array(rows, dtype=np.int64) * self.context


class RandomBatches(Batches):
    """Micro-batches of sequences at random offsets, each a function of the seed and of its position in the run."""

    def __init__(self, tokens: Tokens, context: int, batch: int, seed: int, share: tuple[int, int] = (0, 1)) -> None:
        super().__init__(tokens, context, batch, seed, share)
        self._key = np.array([seed, 0], dtype=np.uint64)

    def _starts(self, positions: range) -> npt.NDArray[np.int64]:
        # Philox makes four numbers of 64 bits from each value of its counter; a sequence takes the first of them.
        drawn = np.random.Philox(key=self._key, counter=positions.start).random_raw(4 * len(positions))[::4]
        return (drawn % np.uint64(len(self._tokens) - self.context)).astype(np.int64)


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    # Sorting raw output: numpy keeps the bits of Philox from release to release, but not what permutation() makes of
    # them, and a resumed run must go on in the same order.
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


# ---- The loss of a batch.


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def make_loss(config: Config, model: nn.Module) -> Loss:
    """The loss that the settings choose. Call it before the model is converted, sharded or compiled."""
    widest = max((m.out_features for m in model.modules() if isinstance(m, nn.Linear)), default=0)
    if config.loss.is_chunked(widest) and (head := find_head(model)) is not None:
        return ChunkedLoss(head, config.loss.chunk)
    if config.loss.logits != "chunked":
        return whole_loss
    raise ConfigError(
        "loss.logits = chunked requires a model whose logits are the outputs of a linear layer without bias, scaled or "
        f"capped; {type(model).__name__} computes them in another way: choose auto or whole"
    )


def whole_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy, 0-dim, of int64 inputs and targets, each [B, T]; logits and sums in float32."""
    predicted = logits_of(model(inputs))
    return _balanced(F.cross_entropy(predicted.flatten(0, 1).float(), targets.flatten()), model)


def _balanced(loss: Tensor, model: nn.Module) -> Tensor:
    """`loss`, with the gradient of the balance loss of a mixture added to its own."""
    balance = model.take_balance() if isinstance(model, Mixture) else None
    return loss if balance is None else loss + (balance - balance.detach())


@dataclass(frozen=True)
class ChunkedLoss:
    """The loss of `whole_loss`, with the logits of `chunk` tokens in memory at a time (`octavo.nn.fused_loss`)."""

    head: Head
    chunk: int

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        with computing_loss(model, self.head, Task(targets), self.chunk):
            loss: Tensor = model(inputs)
        return _balanced(loss, model)


# ---- The loss of a batch in a precision, and of text that the model was not trained on.


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
    """The mean loss over `count` batches (None: each once), and the number of tokens that were predicted."""
    whole = max(batches.sequences // batches.batch, 1)
    count = whole if count is None else min(count, whole)
    with own_random(device):
        losses = [next_token_loss(model, batches.at(index), device, precision, loss) for index in range(count)]
    return float(torch.stack(losses).mean()), count * batches.batch * batches.context
