"""The loss of a causal model from the inputs of its head, a chunk of tokens at a time.

    z[T,V] = x[T,K] @ w[V,K]^T      y = scale * z, or cap * tanh(scale * z)      loss = sum over t of loss[t] / n
    g[T,V] = dloss/dz               dx[T,K] = g @ w                              dw[V,K] = g^T @ x

With a vocabulary V of 128k, z and the tensors of its size that autograd saves are the peak of a training step: 4 GB
each for 8,192 tokens in FP32. Here the forward pass goes over chunks of tokens, turns z into g in place
(`octavo.ops.softmax_loss`) and computes dx and dw too. So z is computed once and never exists as a whole (Hsu et al.
2024, Liger Kernel, arXiv:2410.10989). dw is summed in float32 where there are more than two chunks, because each sum
in BF16 rounds it once more.

With tensor parallelism each rank has the rows of w of its part of the vocabulary. The ranks exchange lse and the logit
of the label of each token, and add up dx.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from inspect import signature
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import ops
from octavo.nn.linear import compute_dtype
from octavo.nn.module_tools import decoder_layers, differentiable_once, find_cache, mix_into, unmix, unsupported
from octavo.numerics.formats import E4M3
from octavo.numerics.qtensor import ROW, TENSOR, Cast, QTensor
from octavo.ops.registration import operation
from octavo.ops.softmax_loss import IGNORED, cross_entropy, cross_entropy_gradient, multiply

CHUNK = 4096  # tokens whose logits are in memory at a time
HeadRecipe = Literal["bf16", "rowwise"]


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk: int = CHUNK,
    num_items: Tensor | int | None = None,
    ignore_index: int = -100,
    scale: float = 1.0,
    cap: float = 0.0,
    recipe: HeadRecipe = "bf16",
) -> Tensor:
    """The cross-entropy, 0-dim, of the logits of `x @ weight.T` [..., V] and int64 `labels` [...].

    Products run in the dtype of autocast, if it is on, and otherwise in that of `x` [..., K]. Softmax and loss are
    float32 (float64 if x is). The gradients can be computed once (no `retain_graph`, no second derivatives). A DTensor
    `weight` that is sharded by rows over a mesh of one dimension is the vocabulary's share of each rank. Then x holds
    all tokens, the same on each rank, or each rank's equal share of the tokens along dimension 1, as in sequence
    parallelism.

    Args:
        chunk: tokens whose logits are in memory at a time.
        num_items: the sum over tokens is divided by this; None divides by the number of labels that are not ignored.
        ignore_index: the label of tokens that have no loss.
        scale, cap: the logits are scale * z, or cap * tanh(scale * z) if cap is not 0, of the products z.
        recipe: "rowwise" computes the three products in FP8.

    Raises:
        ValueError: labels of another number or dtype, a chunk below 1, an unknown recipe, or a weight that is sharded
            in another way.
        IndexError: on a CPU, a label that is no row of the weight. In compiled code, and on a GPU, which is not waited
            for, the loss and its gradients are NaN.
    """
    group, first, vocabulary = "", 0, len(weight)
    if hasattr(weight, "device_mesh"):
        x, weight, group, first = _vocabulary_parallel(x, weight, labels)
    device = x.device.type
    dtype = compute_dtype(x)
    rows, labels = x.flatten(0, -2), labels.flatten().to(x.device)
    if len(rows) != len(labels) or labels.dtype != torch.int64:
        found = f"{len(rows)} tokens and {len(labels)} labels of {labels.dtype}"
        raise ValueError(f"the loss needs an int64 label for each token; got {found}")
    if chunk < 1 or recipe not in get_args(HeadRecipe):
        raise ValueError(f"the loss takes a chunk of at least 1 and 'bf16' or 'rowwise'; got {chunk} and {recipe!r}")
    ignored = labels == ignore_index
    wrong = ((labels < 0) | (labels >= vocabulary)) & ~ignored
    if device == "cpu" and not (torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()) and wrong.any():
        raise IndexError(f"labels are from 0 to {vocabulary - 1}, or {ignore_index=}; got {labels[wrong][0]}")
    count = (~ignored).sum() if num_items is None else torch.as_tensor(num_items, device=x.device)
    # A sum in place of `any`: of compiled code's `any`, an int8 number, Triton 3.6 warns.
    count = count.to(torch.promote_types(dtype, torch.float32)).view(()).masked_fill(wrong.sum() > 0, torch.nan)
    labels = (labels - first).masked_fill(ignored, IGNORED)
    # within Function.forward gradients are always disabled
    wants = [torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, weight)]
    with torch.autocast(device, enabled=False):
        options = (dtype, chunk, *wants, scale, cap, group, recipe == "rowwise")
        return _LinearCrossEntropy.apply(rows, weight, labels, count, options)  # type: ignore[no-untyped-call]


def _vocabulary_parallel(x: Any, weight: Any, labels: Tensor) -> tuple[Tensor, Tensor, str, int]:
    """All tokens, this rank's rows of the weight, the name of the ranks' group, and the number of the first row."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh, placements = weight.device_mesh, weight.placements
    if tuple(placements) != (Shard(0),):
        raise ValueError(
            f"the head's weight must be sharded by rows over one mesh dimension; got {placements} on {mesh}"
        )
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate() if x.shape[:-1] == labels.shape else Shard(1)])
    # Each rank computes the part of dx that its part of the vocabulary gives: the parts are added in backward.
    every = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    first = mesh.get_local_rank() * -(-len(weight) // mesh.size())
    return every, weight.to_local(grad_placements=placements), mesh.get_group().group_name, first


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, count: Tensor, options: tuple[Any, ...]) -> Tensor:
        # Compiled code calls one operation, so that it has no copy of the logits; what traces eager code sees all.
        run = _linear_cross_entropy if torch.compiler.is_compiling() else _linear_cross_entropy.function
        total, dx, dw = run(x, weight, labels, count, *options)
        dtype, _, wants_x, wants_w, *_ = options
        ctx.late, ctx.dtype = dtype == torch.float16, x.dtype
        ctx.save_for_backward(dx if wants_x else None, dw if wants_w else None, count)
        return total / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # the gradients do not depend on `grad` alone
            raise unsupported("double backward (create_graph=True) of a loss that was fused with its head")
        dx, dw, count = ctx.saved_tensors
        grad = grad / count if ctx.late else grad
        if dx is not None:
            dx = (dx * grad).to(ctx.dtype)
        if dw is not None and torch.compiler.is_compiling():
            dw = (dw * grad).to(dw.dtype)
        elif dw is not None:  # in place: a second tensor of the weight's size would be the peak of many models
            multiply(dw, grad)
        return dx, dw, None, None, None


def _like(x: Tensor, weight: Tensor, labels: Tensor, count: Tensor, dtype: torch.dtype, *options: Any) -> Any:
    _, wants_x, wants_w, *_ = options
    dx = x.new_empty(x.shape, dtype=dtype) if wants_x else x.new_empty(0)
    return count.new_empty(()), dx, weight.new_empty(weight.shape) if wants_w else x.new_empty(0)


@operation(like=_like, repeats=lambda *_: False)
def _linear_cross_entropy(
    x: Tensor,  # [T, K]
    weight: Tensor,  # [V, K]
    labels: Tensor,  # [T], as `cross_entropy` takes them
    count: Tensor,  # 0-dim
    dtype: torch.dtype,
    chunk: int,
    wants_x: bool,
    wants_w: bool,
    scale: float,
    cap: float,
    group: str,
    fp8: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of the losses, and dx [T, K] of `dtype` and dw [V, K] of the weight's, None where they are not wanted.

    They are divided by `count`, but not in FP16, whose range is too small.
    """
    head = _Fp8Head(weight.to(dtype)) if fp8 else _Head(weight.to(dtype))
    x = x.to(dtype)
    dx = torch.empty_like(x) if wants_x else None
    wide = weight.dtype if len(x) <= 2 * chunk else torch.promote_types(weight.dtype, torch.float32)
    dw = None
    factor = torch.ones_like(count) if dtype == torch.float16 else count.reciprocal()
    total, wanted = torch.zeros_like(count), factor if wants_x or wants_w else None
    for start in range(0, len(x), chunk):
        rows, some = x[start : start + chunk], labels[start : start + chunk]
        z = head.products(rows)
        own = cross_entropy(z, some, None if group or fp8 else wanted, None, scale, cap)
        lse, picked = _joined(*own, group) if group else own
        total += torch.where(some == IGNORED, 0, lse - picked).sum()
        if wanted is None:
            continue
        by_row = by_column = z
        if fp8:
            by_row, by_column = _gradients(z, some, wanted, lse, own[1], scale, cap, wants_x, wants_w)
        elif group:
            cross_entropy(z, some, wanted, lse, scale, cap)
        del z  # each tensor has the size of the logits, and is freed before the next is made
        if dx is not None:
            dx[start : start + chunk] = head.dx(by_row)
        del by_row
        if wants_w:
            dw = head.dw(dw, by_column, rows, wide)
        del by_column
    if wants_w:
        dw = torch.zeros_like(weight) if dw is None else dw.to(weight.dtype)  # None of no tokens
    return total, dx, dw  # type: ignore[return-value]


def _joined(lse: Tensor, picked: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Both [c], of all parts of the vocabulary that the ranks have, from those of this rank."""
    most = _reduced(lse, "max", group)
    total, picked = _reduced(torch.stack(((lse - most).exp(), picked)), "sum", group)
    return most + total.log(), picked


def _reduced(tensor: Tensor, by: str, group: Any) -> Tensor:
    return collectives.wait_tensor(collectives.all_reduce(tensor, by, group))  # type: ignore[no-untyped-call]


class _Head:
    """The three products with a weight [V, K] in its dtype."""

    def __init__(self, w: Tensor) -> None:
        self.w = w

    def products(self, x: Tensor) -> Tensor:
        return x @ self.w.t()  # [c,K] @ [V,K]^T

    def dx(self, g: Any) -> Tensor:
        return g @ self.w  # [c,V] @ [V,K]

    def dw(self, dw: Tensor | None, g: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        """g[c,V]^T @ x[c,K], added to dw[V,K] of `dtype` if there is one."""
        if g.dtype == dtype:
            return g.t() @ x if dw is None else dw.addmm_(g.t(), x)
        dw = torch.zeros_like(self.w, dtype=dtype) if dw is None else dw
        if g.is_cuda:
            torch.addmm(dw, g.t(), x, out_dtype=dw.dtype, out=dw)
        else:  # the CPU has no product of BF16 with an FP32 sum
            dw.addmm_(g.t().to(dw.dtype), x.to(dw.dtype))
        return dw


class _Fp8Head(_Head):
    """The three products in e4m3. The weight has one scale: its bytes serve z and, transposed, dx.

    Rows of x and g have scales of their own. For dw both are quantized with a scale for each column: a token of the
    vocabulary that is no label keeps its small gradient.
    """

    def __init__(self, w: Tensor) -> None:
        super().__init__(w)
        q = ops.quantize(w, Cast(granularity=TENSOR))
        scales = [q.scale.expand(size, 1).contiguous() for size in w.shape]
        self.q = QTensor(q.data, scales[0], E4M3, ROW)
        self.q_t = QTensor(ops.transpose(q.data), scales[1], E4M3, ROW)

    def products(self, x: Tensor) -> Tensor:
        x_q = ops.quantize(x, Cast())
        return ops.scaled_mm(x_q, self.q, out_dtype=self.w.dtype, fast_accumulation=True)  # [c,K] @ [V,K]^T

    def dx(self, g: QTensor) -> Tensor:
        # Its sum over the vocabulary is not accumulated fast: the many small p would be lost beside the label's.
        return ops.scaled_mm(g, self.q_t, out_dtype=self.w.dtype)  # [c,V] @ [K,V]^T

    def dw(self, dw: Tensor | None, g: QTensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        part = ops.scaled_mm(g, ops.quantize_transposed(x, Cast()), out_dtype=self.w.dtype)  # [V,c] @ [K,c]^T
        return part.to(dtype) if dw is None else dw.add_(part)


def _gradients(*args: Any) -> Any:
    """g by row and its transpose, by the arguments of `cross_entropy_gradient`; None where it is not wanted."""
    found = cross_entropy_gradient(*args)
    pairs = zip(args[-2:], (found[:2], found[2:]), strict=True)
    return [QTensor(*each, E4M3, ROW) if wanted else None for wanted, each in pairs]


# ---- Finding out how a model computes its logits: from the operations, and not from the model's name.


@dataclass(frozen=True)
class Head:
    """The linear layer `name` of a model, and how the model makes the logits of its outputs z: scale * z, or
    cap * tanh(scale * z) if cap is not 0."""

    name: str
    scale: float = 1.0
    cap: float = 0.0

    def then(self, step: str, number: Any) -> "Head | None":
        """With one more operation behind it; None for one that no scale or cap stands for."""
        if step in ("mul", "div") and isinstance(number, int | float):
            factor = float(number) if step == "mul" else 1 / float(number)
            return replace(self, cap=self.cap * factor) if self.cap else replace(self, scale=self.scale * factor)
        if step == "tanh" and not self.cap:
            return replace(self, cap=1.0)
        return self if step in ("_to_copy", "slice", "alias", "view", "clone", "detach") else None


class _Following(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the outputs of linear layers through the operations that scale and cap them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, tuple[Tensor, Head]] = {}  # with the tensor, whose id is its own while it lives

    def note(self, name: str) -> Callable[..., None]:
        return lambda module, args, output: self.made.update({id(output): (output, Head(name))})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True  # transformers asks if no texts are packed
        if func is torch.ops.aten._grouped_mm.default and args[0].is_meta:  # of experts; PyTorch's takes BF16 alone
            return args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        output = func(*args, **(kwargs or {}))
        if args and id(args[0]) in self.made and isinstance(output, Tensor) and output.shape == args[0].shape:
            step = func.overloadpacket.__name__.removesuffix("_")
            head = self.made[id(args[0])][1].then(step, args[1] if len(args) > 1 else None)
            self.made.pop(id(output), None)
            if head is not None:
                self.made[id(output)] = output, head
        return output


@torch.no_grad()
def find_head(model: Any, *, with_loss: bool = False) -> Head | None:
    """The head of a causal model; None unless its logits are scaled or capped outputs of a linear layer without bias.

    Runs `model` once, in evaluation mode, on a few tokens; it may be on the meta device. With `with_loss` it gets
    labels, and the logits are what it gives to its `loss_function`; None if it computes the loss in another way.
    """
    following = _Following()
    given: list[Any] = []

    def ask(logits: Tensor, *_: Any, **__: Any) -> Tensor:
        given.append(logits)
        return logits.sum()

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(setattr, module, "training", module.training)
            if name and type(module) is nn.Linear and module.bias is None:  # a subclass may compute in another way
                stack.enter_context(module.register_forward_hook(following.note(name)))
        model.eval()
        tokens = torch.zeros(1, 8, dtype=torch.int64, device=next(model.parameters()).device)  # for up to 8 ranks
        if with_loss:
            model._loss_function = ask
            stack.callback(delattr, model, "_loss_function")
        stack.enter_context(following)
        output = model(tokens, labels=tokens) if with_loss else model(tokens)
        if not with_loss:
            given.append(output if isinstance(output, Tensor) else getattr(output, "logits", None))
    return following.made.get(id(given[0]), (None, None))[1] if given else None


# ---- A model that computes its loss so.


@dataclass
class Task:
    """The labels of a forward pass, and their loss, which the head computes where it has its inputs and its weight.

    There FSDP2 has gathered the weight.
    """

    labels: Tensor
    num_items: Tensor | int | None = None
    ignore_index: int = -100
    loss: Tensor | None = None
    logits: object = None  # what the model takes for its logits
    tied: Tensor | None = None  # the weight that a `LossEmbedding` passes to the head

    def run(self, x: Any, weight: Tensor, head: Head, chunk: int, recipe: HeadRecipe) -> Any:
        """Compute the loss; returns what takes the place of the logits: a DTensor if x is one, as its styles expect."""
        self.loss = linear_cross_entropy(
            x, weight, self.labels, chunk=chunk, num_items=self.num_items, ignore_index=self.ignore_index,
            scale=head.scale, cap=head.cap, recipe=recipe,
        )  # fmt: skip
        y: Any = self.loss.detach().view((1,) * x.ndim)  # code of a model reads the shape, or takes a slice
        return type(x).from_local(y, x.device_mesh, x.placements) if hasattr(x, "device_mesh") else y

    def result(self, logits: object, *args: Any, **kwargs: Any) -> Tensor | None:
        """The loss, for a model that asks a function for it."""
        self.logits = logits
        return self.loss


class LossHead:
    """Mixed into the head of a model whose loss is fused."""

    added: ClassVar[tuple[str, ...]] = ("task", "options")
    task: Task | None
    options: tuple[Head, int, HeadRecipe]
    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.task is not None:
            return self.task.run(x, self.weight if self.task.tied is None else self.task.tied, *self.options)
        return super().forward(x)  # type: ignore[misc]  # of the head's own class


@contextmanager
def computing_loss(model: nn.Module, head: Head, task: Task, chunk: int) -> Iterator[None]:
    """Within the block a call of `model` returns the loss of `task`, whatever the class of `model` returns else."""
    layer: Any = model.get_submodule(head.name)
    mix_into(layer, LossHead)
    layer.task, layer.options = task, (head, chunk, "bf16")
    # Before the hook of FSDP, which gathers the weights for the backward pass of what the model returns.
    hook = model.register_forward_hook(lambda *_: task.loss, prepend=True)
    try:
        yield
    finally:
        hook.remove()
        unmix(layer)


class LossEmbedding:
    """Mixed into the embedding of a model whose loss is fused, where the head has the same weight [V, K].

    The head gets the weight from here, so that its gradient comes back here, and the gradients of the tokens are added
    to their rows of it. Otherwise autograd makes a second gradient of the weight's size, zero in most rows.
    """

    added: ClassVar[tuple[str, ...]] = ("task",)
    task: Task | None
    weight: Tensor
    padding_idx: int | None

    def forward(self, tokens: Tensor) -> Tensor:
        plain = self.weight.requires_grad and not (hasattr(self.weight, "device_mesh") or torch.compiler.is_compiling())
        if self.task is None or not plain:
            return super().forward(tokens)  # type: ignore[misc]
        y, self.task.tied = _TiedEmbedding.apply(self.weight, tokens, self.padding_idx)  # type: ignore[no-untyped-call]
        return y


class _TiedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, padding: int | None) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.padding = len(weight), padding
        return F.embedding(tokens, weight), weight

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor | None, dw: Tensor | None) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        if dw is None:  # of a loss that the head does not compute
            padding = -1 if ctx.padding is None else ctx.padding
            dw = torch.ops.aten.embedding_dense_backward(dy, tokens, ctx.rows, padding, False)
        elif dy is not None and dy.numel() > 0:
            tokens, dy = tokens.flatten(), dy.flatten(0, -2)
            if ctx.padding is not None:
                dy = dy.masked_fill((tokens == ctx.padding).unsqueeze(1), 0)
            tokens, order = tokens.sort(stable=True)
            group = (tokens.diff(prepend=tokens[:1]) != 0).cumsum(0)  # of equal tokens: groups 0, 1, ..., some empty
            sizes = torch.zeros_like(group).scatter_add_(0, group, torch.ones_like(group))
            wide = torch.promote_types(dy.dtype, torch.float32)
            sums = torch.segment_reduce(dy[order].to(wide), "sum", lengths=sizes, unsafe=True)
            # Row 0 stands for the empty groups, whose sums are zero.
            dw.index_add_(0, torch.zeros_like(group).scatter_(0, group, tokens), sums.to(dw.dtype))
        return dw, None, None


class LossModel:
    """Mixed into a causal model whose head is a `LossHead`."""

    added: ClassVar[tuple[str, ...]] = ("loss_head", "loss_embedding", "decoder_layers")
    loss_head: str
    loss_embedding: str  # of a `LossEmbedding`, or ""
    decoder_layers: list[nn.Module]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__bases__[0] is LossModel:
            cls.forward = _with_loss(cls.__bases__[1].forward)  # type: ignore[attr-defined]


def _with_loss(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model of a class whose own is `theirs`. It keeps the signature, which Trainer reads."""
    names = list(signature(theirs).parameters)
    place = names.index("labels") - 1 if "labels" in names else None

    @wraps(theirs)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs
        if place is None:  # a model that returns logits alone
            ours = ("labels", "num_items_in_batch", "ignore_index", "shift_labels")
            given = {name: kwargs.pop(name) for name in ours if name in kwargs}
        labels = given.get("labels") if place is None or len(args) <= place else args[place]
        head = self.get_submodule(self.loss_head) if hasattr(self, "loss_head") else None  # Accelerate keeps `forward`
        if getattr(head, "task", None) is not None:
            raise RuntimeError("fuse_loss=True allows one thread at a time: give each a copy.deepcopy of the model")
        own_logits = place is not None and (not self.training or hasattr(self, "_loss_function"))
        if labels is None or own_logits or head is None:
            return theirs(self, *args, **kwargs)
        if not isinstance(head, LossHead):
            raise RuntimeError(
                f"{self.loss_head} was replaced by a {type(head).__name__} after octavo.convert, which had fused it "
                "with the loss: call octavo.restore first, or convert with fuse_loss=False"
            )
        ignore, shifted = given.get("ignore_index", -100), given.get("shift_labels")
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=ignore)[..., 1:]
        tied = self.get_submodule(self.loss_embedding) if self.loss_embedding else None
        parts: list[Any] = [head, tied] if isinstance(tied, LossEmbedding) and tied.weight is head.weight else [head]
        task = Task(shifted, given.get("num_items_in_batch"), ignore)
        for part in parts:
            part.task = task
        self._loss_function = task.result  # what a model of transformers calls, if it is there
        cache = find_cache(self, self.decoder_layers, args, kwargs)
        try:
            output = theirs(self, *args, **kwargs | cache)
        finally:
            for part in parts:
                part.task = None
            del self._loss_function
        if place is None:
            return task.loss
        if isinstance(output, tuple):
            return tuple(value for value in output if not any(value is each for each in (task.logits, *cache.values())))
        return type(output)(**{name: value for name, value in output.items() if name not in ("logits", *cache)})

    return forward


def find_loss(model: nn.Module) -> tuple[nn.Module, Head]:
    """The causal model in `model`, a model of transformers or `model` itself, and its head.

    Raises a ValueError for a model that computes its logits or its loss in another way.
    """
    owner: Any = next((m for m in model.modules() if hasattr(type(m), "loss_function")), model)
    known = not hasattr(owner, "loss_function") or owner.loss_function.__name__ == "ForCausalLMLoss"
    replaced = not vars(owner).keys().isdisjoint(("forward", "_loss_function"))  # as Accelerate and TRL replace forward
    with_loss = "labels" in signature(owner.forward).parameters
    try:
        head = find_head(owner, with_loss=with_loss) if known and not replaced else None
    except Exception as error:
        raise ValueError(
            f"fuse_loss=True runs {type(owner).__name__} on token ids alone to find its head, and that fails "
            f"({error}): leave fuse_loss out"
        ) from error
    if head is None:
        how = "whose forward or loss was replaced: convert a new model before others change it, or"
        how = how if replaced else "whose loss or logits are computed in another way:"
        raise ValueError(
            "fuse_loss=True requires a causal model with the forward and the loss of its class, whose logits are the "
            f"outputs of a linear layer without bias, scaled or capped; got {type(owner).__name__}, {how} "
            "leave fuse_loss out"
        )
    return owner, head


def join_loss(owner: Any, head: Head, recipe: HeadRecipe) -> None:
    """Make the causal model `owner` compute its loss from the inputs of its `head`."""
    mix_into(owner, LossModel)
    owner.loss_head = head.name
    owner.decoder_layers = decoder_layers(owner)
    module = owner.get_submodule(head.name)
    mix_into(module, LossHead)
    module.task, module.options = None, (head, CHUNK, recipe)
    special = ("scale_grad_by_freq", "sparse", "max_norm")  # or its gradient is the sum of those of its tokens
    tied = [(n, m) for n, m in owner.named_modules() if type(m) is nn.Embedding and m.weight is module.weight]
    owner.loss_embedding = next((n for n, m in tied if not any(getattr(m, key) for key in special)), "")
    if owner.loss_embedding:
        embedding = owner.get_submodule(owner.loss_embedding)
        mix_into(embedding, LossEmbedding)
        embedding.task = None
