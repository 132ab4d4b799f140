"""The text that a language model is trained on, in batches of token ids, and the loss of a batch.

    loss = mean over tokens of -log p(token | tokens before it)        perplexity = exp(loss)

`whole_loss` computes all logits. `ChunkedLoss` replaces the model's head, so that the head's inputs go to
`linear_cross_entropy`, which computes the logits of some tokens at a time. The head's weight is read within the
model's forward pass: there FSDP2 has gathered it. The gradient of a mixture includes that of its balance loss; the
value of the loss does not.
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
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from octavo.data import DataError, Reading, read_text
from octavo.models import BUILT_IN_MODELS
from octavo.models.decoder import head_name, logits_of
from octavo.models.mixture import Mixture
from octavo.models.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    CharacterTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    load_tokenizer,
)
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
    if config.loss.is_chunked(widest) and (name := head_name(model)) is not None:
        return ChunkedLoss(name, config.loss.chunk)
    if config.loss.logits != "chunked":
        return whole_loss
    raise ConfigError(
        f"loss.logits = chunked requires a model whose logits are the outputs of a linear layer without bias; "
        f"{type(model).__name__} computes them in another way: choose auto or whole"
    )


def whole_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy, 0-dim, of int64 inputs and targets, each [B, T]; logits and sums in float32."""
    predicted = logits_of(model(inputs))
    return _balanced(F.cross_entropy(predicted.flatten(0, 1).float(), targets.flatten()), model)


def _balanced(loss: Tensor, model: nn.Module) -> Tensor:
    """`loss`, with the gradient of the balance loss of a mixture added to its own."""
    balance = model.take_balance() if isinstance(model, Mixture) else None
    return loss if balance is None else loss + (balance - balance.detach())


class ChunkedLoss:
    """The loss of `whole_loss`, with the logits of `chunk` tokens in memory at a time. `head` names the head."""

    def __init__(self, head: str, chunk: int) -> None:
        self._parent, _, self._name = head.rpartition(".")
        self._chunk = chunk

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        owner = model.get_submodule(self._parent)
        head = getattr(owner, self._name)
        setattr(owner, self._name, _LossHead(head, targets, self._chunk))
        try:
            return _balanced(logits_of(model(inputs)), model)
        finally:
            setattr(owner, self._name, head)


class _LossHead(nn.Module):
    """Returns the loss of the head's outputs in their place."""

    def __init__(self, head: nn.Linear, targets: Tensor, chunk: int) -> None:
        super().__init__()
        self.head, self.targets, self.chunk = head, targets, chunk

    def forward(self, x: Tensor) -> Tensor:
        return linear_cross_entropy(x, self.head.weight, self.targets, chunk=self.chunk)


# ---- The cross-entropy of a linear layer's outputs, with the outputs of a chunk of tokens at a time.
#
#     z[T,V] = x[T,K] @ w[V,K]^T      loss = mean over t of  log(sum_v exp z[t,v]) - z[t,target]
#     g[T,V] = softmax(z) - onehot(target)        dx[T,K] = g @ w / T        dw[V,K] = g^T @ x / T
#
# With a vocabulary V of 128k, z and the tensors of its size that autograd saves are the peak of a training step: 4 GB
# each for 8,192 tokens in FP32. The forward pass here goes over chunks of tokens and computes g @ w and g^T @ x too, so
# that z is computed once and never exists as a whole. The backward pass multiplies both by the gradient of the loss
# (Hsu et al. 2024, Liger Kernel, arXiv:2410.10989).
#
# With tensor parallelism each rank has the rows of w of its part of the vocabulary. The ranks exchange one number a
# token, the logarithm of their sum over v, and add up dx.


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, *, chunk: int) -> Tensor:
    """The mean cross-entropy, 0-dim, of `x @ weight.T` [..., V] and int64 `targets` [...], `chunk` tokens at a time.

    Products run in the dtype of autocast, if it is on, and otherwise in that of `x` [..., K]. Softmax, sums over tokens
    and the gradient of `weight` [V, K] are float32 (float64 if x is). The gradients can be computed once (no
    `retain_graph`, no second derivatives). A DTensor `weight` that is sharded by rows over a mesh of one dimension is
    the vocabulary's share of each rank: then x holds all tokens, the same on each rank, or each rank's equal share of
    the tokens along dimension 1, as sequence parallelism has them.
    """
    group, first = None, 0
    if hasattr(weight, "device_mesh"):
        x, weight, group, first = _vocabulary_parallel(x, weight, targets)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    rows, labels = x.flatten(0, -2), targets.flatten()
    # within Function.forward gradients are always disabled
    wants = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, weight)]
    with torch.autocast(device, enabled=False):
        return _LinearCrossEntropy.apply(rows, weight, labels, dtype, chunk, wants, first, group)  # type: ignore[no-any-return, no-untyped-call]


def _vocabulary_parallel(x: Tensor, weight: Any, targets: Tensor) -> tuple[Tensor, Tensor, ProcessGroup, int]:
    """All tokens, this rank's rows of the weight, the group that shares the weight, and the number of the first row."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, placements = weight.device_mesh, weight.placements
    if tuple(placements) != (Shard(0),):
        raise ValueError(
            f"the head's weight must be sharded by rows over one mesh dimension; got {placements} on {mesh}"
        )
    shared: Any = x
    if not isinstance(x, DTensor):
        shared = DTensor.from_local(x, mesh, [Replicate() if x.shape[:-1] == targets.shape else Shard(1)])
    # Each rank computes the part of dx that its part of the vocabulary gives: the parts are added in backward.
    every = shared.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    first = mesh.get_local_rank() * -(-len(weight) // mesh.size())
    return every, weight.to_local(grad_placements=placements), mesh.get_group(), first


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [T, K]
        weight: Tensor,  # [V, K]
        targets: Tensor,  # [T]
        dtype: torch.dtype,
        chunk: int,
        wants: list[bool],
        first: int,
        group: ProcessGroup | None,
    ) -> Tensor:
        exact = torch.promote_types(dtype, torch.float32)
        inputs, w = x.to(dtype), weight.to(dtype)
        dx = torch.empty_like(inputs) if wants[0] else None
        dw = torch.zeros_like(weight, dtype=exact) if wants[1] else None
        picked = torch.empty(len(x), dtype=exact, device=x.device)  # [T], log p of the targets
        for start in range(0, len(x), chunk):
            some = slice(start, start + chunk)
            local = targets[some] - first
            picked[some] = _chunk(inputs[some], w, local, None if dx is None else dx[some], dw, exact, group)
        if group is not None:
            picked = _sum(picked, group)
        ctx.save_for_backward(dx, dw)
        ctx.dtypes, ctx.tokens = (x.dtype, weight.dtype), len(x)
        return -picked.mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        factor = grad / ctx.tokens
        if dx is not None:
            dx = (dx.to(factor.dtype) * factor).to(ctx.dtypes[0])
        if dw is not None:  # in place: a second tensor of the weight's size would be the peak of many models
            dw = dw * factor if torch.compiler.is_compiling() else dw.mul_(factor)
            dw = dw.to(ctx.dtypes[1])
        return dx, dw, *[None] * 6


def _chunk(
    x: Tensor,  # [c, K]
    w: Tensor,  # [V, K]
    target: Tensor,  # [c]; outside 0 to V - 1 if the row of w is another rank's
    dx: Tensor | None,  # [c, K], written
    dw: Tensor | None,  # [V, K], added to
    exact: torch.dtype,
    group: ProcessGroup | None,
) -> Tensor:
    """log p of the targets [c], and 0 where another rank has the row. All tensors of c * V elements end here."""
    log_p = _log_softmax((x @ w.t()).to(exact), group)  # [c,K] @ [V,K]^T
    own = ((target >= 0) & (target < len(w)))[:, None]
    column = target.clamp(0, len(w) - 1)[:, None]
    picked = torch.where(own, log_p.gather(1, column), 0)[:, 0]
    if dx is not None or dw is not None:
        g = log_p.exp_().scatter_add_(1, column, -own.to(exact)).to(x.dtype)
        del log_p
        if dx is not None:
            dx.copy_(g @ w)  # [c,V] @ [V,K]
        if dw is not None:
            _add_product(dw, g, x)
    return picked


def _log_softmax(logits: Tensor, group: ProcessGroup | None) -> Tensor:
    """log softmax(logits) [c, V]; with a group, the sum includes the logits of the other ranks."""
    log_p = torch.log_softmax(logits, 1)
    if group is not None:
        own = torch.logsumexp(logits, 1)  # [c]
        every = own.new_zeros(group.size(), len(own))
        every[group.rank()] = own
        log_p += (own - torch.logsumexp(_sum(every, group), 0))[:, None]
    return log_p


def _sum(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks of a group, in a way that `torch.compile` can trace."""
    return collectives.wait_tensor(collectives.all_reduce(tensor, "sum", group))  # type: ignore[no-any-return, no-untyped-call]


def _add_product(dw: Tensor, g: Tensor, x: Tensor) -> None:
    """dw[V,K] += g[c,V]^T @ x[c,K], with sums in the dtype of dw."""
    if g.dtype == dw.dtype:
        dw.addmm_(g.t(), x)
    elif g.is_cuda and torch.compiler.is_compiling():  # torch 2.11 cannot trace addmm with out_dtype
        dw += torch.mm(g.t(), x, out_dtype=dw.dtype)
    elif g.is_cuda:
        torch.addmm(dw, g.t(), x, out_dtype=dw.dtype, out=dw)
    else:  # the CPU has no product of BF16 with an FP32 sum
        dw.addmm_(g.t().to(dw.dtype), x.to(dw.dtype))


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
