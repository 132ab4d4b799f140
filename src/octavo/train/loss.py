"""The loss of a language model on a batch of token ids.

    loss = mean over tokens of -log p(token | tokens before it)        perplexity = exp(loss)

`whole_loss` computes all logits. `ChunkedLoss` replaces the model's head, so that the head's inputs go to
`linear_cross_entropy`, which computes the logits of some tokens at a time. The head's weight is read within the
model's forward pass: there FSDP2 has gathered it. The gradient of a mixture includes that of its balance loss; the
value of the loss does not.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from octavo.models.decoder import logits_of
from octavo.models.mixture import Mixture
from octavo.models.tokenizer import Batches

# ---- The loss of a batch.


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


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
