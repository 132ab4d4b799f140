"""The report of a conversion: the layers converted, the layers skipped and why, and the matrices in high precision."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from octavo.nn.module_tools import call_arguments
from octavo.ops import Backend
from octavo.recipe import Recipe
from octavo.tracing import Operation, Tracer
from octavo.util import percent, plural

# ---- A traced forward pass: the FLOPs of each parameter, and the rows that it is multiplied by.


@dataclass(frozen=True)
class ForwardPass:
    """The view of a forward pass by parameter. `names` has the name of each parameter of the model by its id."""

    operations: tuple[Operation, ...]
    called: frozenset[str]
    names: Mapping[int, str]

    def rows_of(self, parameter: Tensor) -> int:
        """The rows that `parameter` is multiplied by, in the largest of its products; 0 if none reads it."""
        name = self.names[id(parameter)]
        return max((each.rows for each in self.operations if name in each.weight), default=0)

    def flops_by_parameter(self, parameters: Sequence[Tensor]) -> dict[int, float]:
        """The FLOPs of each parameter, by its id. Stacked parameters share those of their product by their sizes."""
        sizes = {self.names[id(parameter)]: parameter.numel() for parameter in parameters}
        flops = dict.fromkeys(sizes, 0.0)
        for each in self.operations:
            together = sum(sizes[name] for name in each.weight)
            for name in each.weight:
                flops[name] += each.flops * sizes[name] / together
        return {id(parameter): flops[self.names[id(parameter)]] for parameter in parameters}


def trace_forward(model: nn.Module, batch: Any) -> ForwardPass:
    """The products of `model(batch)`, traced without memory or arithmetic; `model` stays as it is.

    Gradients are on, so that a module in evaluation mode takes none of PyTorch's fast paths, which compute a whole
    layer in one operation. `batch` is a tensor, a sequence of positional arguments, or a mapping of keyword arguments.
    """
    tracer, named = Tracer(model, torch.bfloat16), dict(model.named_parameters())
    for name, parameter in named.items():
        if parameter.is_floating_point():
            tracer.tensors[name].requires_grad_()  # a frozen layer in evaluation mode would take a fast path
    given = tracer.fake(call_arguments(batch))
    with torch.enable_grad(), tracer, tracer.autocast():
        torch.func.functional_call(model, tracer.tensors, *given)
    names = {id(parameter): name for name, parameter in named.items()}
    return ForwardPass(tuple(tracer.operations), frozenset(tracer.called), names)


# ---- The shares of a model's FLOPs and parameters that FP8 computes, and the matrices that stay in high precision.
#
# Every parameter belongs to one of four groups: weights that FP8 GEMMs read; other parameters that a GEMM or a
# convolution reads, listed by name; embeddings; norms, biases and other vectors. A parameter that two modules share
# counts once. Only shapes are read, so the model may be on the meta device.
#
# FLOPs are those of a traced forward pass. Without one, each parameter of the first two groups counts by its size, as
# if all were multiplied by the same rows, and products of activations do not count.


_COMPUTED, _EMBEDDING, _OTHER = "computed", "embedding", "other"

# The kind of a module's matrices, by its class. A subclass stands before its base.
_KINDS: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.MultiheadAttention, "packed attention projection"),
    (NonDynamicallyQuantizableLinear, "attention output, which multi-head attention reads directly"),
    (nn.Linear, "linear layer"),
    (_ConvNd, "convolution"),
    (nn.Bilinear, "bilinear layer"),
    (nn.RNNBase, "recurrent layer"),
    (nn.RNNCellBase, "recurrent layer"),
)


@dataclass(frozen=True)
class Leftover:
    """A parameter that a GEMM reads in high precision; repeated layers are one entry."""

    name: str  # with * for the indices of repeated layers
    kind: str  # such as "expert stack" or "convolution"
    shape: tuple[int, ...]  # of one parameter
    count: int
    share: float  # of the model's parameters, 0 to 1
    flops: float  # the share of the FLOPs, 0 to 1
    tied: bool = False  # an embedding shares the parameter

    def __str__(self) -> str:
        many = f"{self.count} of " if self.count > 1 else ""
        tied = ", shared with the embedding" if self.tied else ""
        return f"{self.name} ({self.kind}, {many}{list(self.shape)}{tied}, {percent(self.share)} of the parameters)"


@dataclass(frozen=True)
class Coverage:
    """The shares of a model's parameters by group, and of its FLOPs; each is 0 to 1."""

    parameters: int  # their number
    computed: float  # the share that FP8 GEMMs read
    left: tuple[Leftover, ...]  # the others that a GEMM or a convolution reads, those of the most FLOPs first
    embeddings: float  # and learned positions
    other: float  # norms, biases and other vectors
    flops: float  # the share of a forward pass that FP8 computes
    activations: float | None = None  # the share of their products, as attention has; None where no pass was traced

    def __str__(self) -> str:
        totals = (("embeddings", self.embeddings), ("norms, biases and other vectors", self.other))
        rest = ", ".join(f"{name} {percent(share)}" for name, share in totals if share)
        by = "of the batch" if self.activations is not None else "estimated from the sizes of the weights"
        shares = f"{percent(self.flops)} of the FLOPs ({by}) and {percent(self.computed)} of the parameters"
        lines = [f"FP8 computes {shares}; left in high precision:"]
        if self.activations:
            lines.append(f"{percent(self.activations)} of the FLOPs: products of activations, such as attention")
        lines += [f"{percent(each.flops)} of the FLOPs: {each}" for each in self.left]
        return "\n  ".join([*lines, f"no FLOPs: {rest} of the parameters" if rest else "nothing else"])


def find_coverage(model: nn.Module, computed: Collection[str], forward: ForwardPass | None = None) -> Coverage:
    """The coverage of `model` if FP8 GEMMs read `computed`: layers, by their `weight`, and parameters, by name."""
    modules, names = dict(model.named_modules(remove_duplicate=False)), set(computed)
    uses: defaultdict[int, list[tuple[str, str, Tensor]]] = defaultdict(list)  # of each parameter, by its id
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        is_computed = name in names or (owner in names and leaf == "weight")
        kind = _COMPUTED if is_computed else _kind(modules[owner], name, parameter)
        uses[id(parameter)].append((name, kind, parameter))
    embedded = {key for key, found in uses.items() if any(kind == _EMBEDDING for _, kind, _ in found)}
    return _sum_up([min(found, key=lambda use: _rank(use[1])) for found in uses.values()], embedded, forward)


def _sum_up(uses: Collection[tuple[str, str, Tensor]], embedded: set[int], forward: ForwardPass | None) -> Coverage:
    if forward is None:
        work = {id(p): float(p.numel()) for _, kind, p in uses if _rank(kind) <= 1}
        flops = sum(work.values()) or 1
    else:
        work = forward.flops_by_parameter([p for _, _, p in uses])
        flops = sum(each.flops for each in forward.operations) or 1
    sizes: Counter[str] = Counter()
    groups: defaultdict[tuple[str, str, tuple[int, ...], bool], list[tuple[str, Tensor]]] = defaultdict(list)
    for name, kind, parameter in uses:
        sizes[kind] += parameter.numel()
        if _rank(kind) == 1:
            pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
            groups[pattern, kind, tuple(parameter.shape), id(parameter) in embedded].append((name, parameter))
    total = max(sum(sizes.values()), 1)
    left = [
        Leftover(
            name=pattern if len(found) > 1 else found[0][0],
            kind=kind,
            shape=shape,
            count=len(found),
            share=len(found) * math.prod(shape) / total,
            flops=sum(work[id(parameter)] for _, parameter in found) / flops,
            tied=tied,
        )
        for (pattern, kind, shape, tied), found in groups.items()
    ]
    left.sort(key=lambda entry: (-entry.flops, -entry.share))
    shares = [sizes[kind] / total for kind in (_COMPUTED, _EMBEDDING, _OTHER)]
    in_fp8 = sum(work[id(p)] for _, kind, p in uses if kind == _COMPUTED) / flops
    activations = None if forward is None else sum(each.flops for each in forward.operations if not each.weight) / flops
    return Coverage(sum(sizes.values()), shares[0], tuple(left), shares[1], shares[2], in_fp8, activations)


def _kind(owner: nn.Module, name: str, parameter: Tensor) -> str:
    for cls, kind in _KINDS:
        if isinstance(owner, cls):
            return kind if parameter.ndim > 1 else _OTHER
    cls_name = type(owner).__name__
    if sum(n > 1 for n in parameter.shape) < 2 or "norm" in cls_name.lower():
        return _OTHER
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag) or re.search(r"embed|position", name, re.IGNORECASE):
        return _EMBEDDING
    if cls_name == "Conv1D":  # of transformers
        return "Conv1D"
    if parameter.ndim == 2:
        return f"matrix of {cls_name}"
    return "expert stack" if "expert" in f"{name} {cls_name}".lower() else "stack of matrices"


def _rank(kind: str) -> int:
    """The rank of a kind. A parameter that two modules share counts as the kind of lower rank."""
    return {_COMPUTED: 0, _EMBEDDING: 2, _OTHER: 3}.get(kind, 1)


@dataclass(frozen=True)
class Row:
    """One linear layer, convolution, weight of attention, or stack of the matrices of experts, in a conversion."""

    name: str
    shape: tuple[int, ...]  # [N, K], or [E, N, K]
    reason: str  # why it was skipped; "" if it was converted
    speedup: float | None = None  # how many times faster FP8 was predicted to be, with `only_if_faster`


def _by_backend(backends: Mapping[str, Backend], of: str) -> list[str]:
    gemms = {each: ", ".join(gemm for gemm in backends if backends[gemm] == each) for each in backends.values()}
    return [f"  {names + of:<2} {backend.name}: {backend.reason}" for backend, names in gemms.items()]


@dataclass(frozen=True)
class Conversion:
    """The report of `convert`; printed, it is a table.

    Args:
        recipe: of the converted layers.
        rows: one for each linear layer of the model, then one for each input weight of `nn.MultiheadAttention`, under
            the name of the parameter, and one for each convolution that is a matrix product.
        backends: the backends of "y", "dx" and "dw".
        coverage: the shares of the FLOPs and the parameters that FP8 computes, and each matrix that stays in high
            precision.
        speedup_source: where the predicted speedups come from; "" without `only_if_faster`.
        experts: one row for each stack of the matrices of experts; its name is that of the parameter.
        expert_backends: the backends of the grouped GEMMs "y", "dx" and "dw" of experts.
        fused: the names of the modules that quantize in the pass of a norm or activation, or attend in FP8, each with a
            description.
        slow_experts: why the converted experts are slower than in BF16; "" if they are not known to be.
    """

    recipe: Recipe
    rows: tuple[Row, ...]
    backends: dict[str, Backend]
    coverage: Coverage
    speedup_source: str = ""
    fused: Mapping[str, str] = field(default_factory=dict)
    experts: tuple[Row, ...] = ()
    expert_backends: Mapping[str, Backend] = field(default_factory=dict)
    slow_experts: str = ""

    @property
    def converted(self) -> list[str]:
        """The names of the converted layers; of experts, the names of their stacked matrices."""
        return [row.name for row in (*self.rows, *self.experts) if not row.reason]

    @property
    def skipped(self) -> dict[str, str]:
        """The names of the skipped layers, as in `converted`, each with its reason."""
        return {row.name: row.reason for row in (*self.rows, *self.experts) if row.reason}

    def summary(self) -> str:
        """The number of layers converted, the backend of each GEMM, and the matrices in high precision."""
        layers = plural(sum(not row.reason for row in self.rows), "linear layer")
        if not self.recipe.quantized:
            return f"{self.recipe.name}: {layers} without eight-bit GEMMs: the recipe casts nothing"
        skipped = sum(bool(row.reason) for row in self.rows)
        lines = [f"{self.recipe.name}: {layers} converted, {skipped} skipped"]
        slow = f"; {self.slow_experts} (only_if_faster=True leaves them in BF16)" if self.slow_experts else ""
        for reason, count in Counter(row.reason for row in self.experts).items():
            outcome = f"left in high precision: {reason}" if reason else f"converted{slow}"
            lines.append(f"  {plural(count, 'stack')} of experts {outcome}")
        lines += _by_backend(self.backends, "")
        lines += _by_backend(self.expert_backends, " of experts") if any(not r.reason for r in self.experts) else []
        lines += [f"  fused: {count} x {what}" for what, count in Counter(self.fused.values()).items()]
        if self.speedup_source:
            lines.append(f"  only if faster: {self.speedup_source}")
        return "\n".join([*lines, *(f"  {line}" for line in str(self.coverage).splitlines())])

    def __repr__(self) -> str:
        """The summary, and the name, [E x] N, K and the outcome of each row. A layer alone has no name."""
        lines = [self.summary()]
        width = max(len(row.name or "(model)") for row in (*self.rows, *self.experts))
        for row in (*self.rows, *self.experts):
            *first, k = row.shape
            speedup = "" if row.speedup is None else f", {row.speedup:.2f}x"
            outcome = f"skipped: {row.reason}" if row.reason else f"converted{speedup}"
            lines.append(f"  {row.name or '(model)':<{width}}  {' x '.join(map(str, first)):>6} x {k:<6}  {outcome}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values: `layers` are the rows of linear layers, then of others, then of experts."""
        return {
            "recipe": self.recipe.to_dict(),
            "layers": [asdict(row) | {"shape": list(row.shape)} for row in (*self.rows, *self.experts)],
            "backends": {gemm: asdict(backend) for gemm, backend in self.backends.items()},
            "expert_backends": {gemm: asdict(backend) for gemm, backend in self.expert_backends.items()},
            "coverage": asdict(self.coverage),
            "speedup_source": self.speedup_source,
            "fused": dict(self.fused),
        }
