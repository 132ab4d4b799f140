"""The shares of a model's FLOPs and parameters that FP8 computes, and the matrices that stay in high precision.

Every parameter belongs to one of four groups: weights that FP8 GEMMs read; other parameters that a GEMM or a
convolution reads, listed by name; embeddings; norms, biases and other vectors. A parameter that two modules share
counts once. Only shapes are read, so the model may be on the meta device.

FLOPs are those of a traced forward pass (`octavo.tracing.forward_pass`). Without one, each parameter of the first two
groups counts by its size, as if all were multiplied by the same rows, and products of activations do not count.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from octavo.tracing.forward_pass import ForwardPass

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
    """A parameter that a GEMM reads in high precision; repeated layers are one entry.

    Args:
        name: of the parameter, with * for the indices of repeated layers.
        kind: what it is, such as "expert stack" or "convolution".
        shape: of one parameter.
        count: how many there are.
        share: their share of the model's parameters, 0 to 1.
        flops: their share of the FLOPs, 0 to 1.
        tied: whether an embedding shares the parameter.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    count: int
    share: float
    flops: float
    tied: bool = False

    def __str__(self) -> str:
        many = f"{self.count} of " if self.count > 1 else ""
        tied = ", shared with the embedding" if self.tied else ""
        return f"{self.name} ({self.kind}, {many}{list(self.shape)}{tied}, {_percent(self.share)} of the parameters)"


@dataclass(frozen=True)
class Coverage:
    """The shares of a model's parameters by group, and of its FLOPs; each is 0 to 1.

    Args:
        parameters: the number of parameters of the model.
        computed: the share of the parameters that FP8 GEMMs read.
        left: the other parameters that a GEMM or a convolution reads, those of the most FLOPs first.
        embeddings: the share of embeddings and learned positions.
        other: the share of norms, biases and other vectors.
        flops: the share of the FLOPs of a forward pass that FP8 computes.
        activations: the share of products of activations, such as attention; None where no pass was traced.
    """

    parameters: int
    computed: float
    left: tuple[Leftover, ...]
    embeddings: float
    other: float
    flops: float
    activations: float | None = None

    def __str__(self) -> str:
        totals = (("embeddings", self.embeddings), ("norms, biases and other vectors", self.other))
        rest = ", ".join(f"{name} {_percent(share)}" for name, share in totals if share)
        by = "of the batch" if self.activations is not None else "estimated from the sizes of the weights"
        shares = f"{_percent(self.flops)} of the FLOPs ({by}) and {_percent(self.computed)} of the parameters"
        lines = [f"FP8 computes {shares}; left in high precision:"]
        if self.activations:
            lines.append(f"{_percent(self.activations)} of the FLOPs: products of activations, such as attention")
        lines += [f"{_percent(each.flops)} of the FLOPs: {each}" for each in self.left]
        return "\n  ".join([*lines, f"no FLOPs: {rest} of the parameters" if rest else "nothing else"])


def find_coverage(model: nn.Module, computed: Collection[str], forward: ForwardPass | None = None) -> Coverage:
    """The coverage of `model` if FP8 computes the layers `computed`.

    Args:
        model: on any device, meta included.
        computed: names of the layers whose `weight`, and of the parameters that, FP8 GEMMs read.
        forward: a pass of `model`, for the FLOPs.
    """
    modules, names = dict(model.named_modules(remove_duplicate=False)), set(computed)
    uses: dict[int, tuple[str, str, Tensor]] = {}
    embedded = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        is_computed = name in names or (owner in names and leaf == "weight")
        kind = _COMPUTED if is_computed else _kind(modules[owner], name, parameter)
        if kind == _EMBEDDING:
            embedded.add(id(parameter))
        known = uses.get(id(parameter))
        if known is None or _rank(kind) < _rank(known[1]):
            uses[id(parameter)] = name, kind, parameter
    return _sum_up(uses.values(), embedded, forward)


def _sum_up(
    uses: Collection[tuple[str, str, Tensor]], embedded: Collection[int], forward: ForwardPass | None
) -> Coverage:
    if forward is None:
        work = {id(p): float(p.numel()) for _, kind, p in uses if _rank(kind) <= 1}
        flops = sum(work.values()) or 1
    else:
        work, flops = forward.flops_by_parameter([p for _, _, p in uses]), forward.flops or 1
    sizes: Counter[str] = Counter()
    groups: defaultdict[tuple[str, str, tuple[int, ...], bool], list[tuple[str, Tensor]]] = defaultdict(list)
    for name, kind, parameter in uses:
        sizes[kind] += parameter.numel()
        if _rank(kind) == 1:
            groups[_pattern(name), kind, tuple(parameter.shape), id(parameter) in embedded].append((name, parameter))
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
    activations = None if forward is None else sum(p.flops for p in forward.products if not p.parameters) / flops
    return Coverage(sum(sizes.values()), shares[0], tuple(left), shares[1], shares[2], in_fp8, activations)


def _kind(owner: nn.Module, name: str, parameter: Tensor) -> str:
    """The kind of a parameter that FP8 does not compute."""
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


def _pattern(name: str) -> str:
    """The name with * for each index."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
