"""The share of a model that FP8 computes, and the matrices that stay in high precision.

Every parameter belongs to one of four groups: weights that FP8 GEMMs read; other parameters that a GEMM or a
convolution reads, listed by name; embeddings; norms, biases and other vectors. A parameter that two modules share
counts once. Only shapes are read, so the model may be on the meta device.
"""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

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
        tied: whether an embedding shares the parameter.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    count: int
    share: float
    tied: bool = False

    def __str__(self) -> str:
        many = f"{self.count} of " if self.count > 1 else ""
        tied = ", shared with the embedding" if self.tied else ""
        return f"{self.name} ({self.kind}, {many}{list(self.shape)}{tied}, {_percent(self.share)})"


@dataclass(frozen=True)
class Coverage:
    """The shares of a model's parameters by group; each is 0 to 1, and they add up to 1.

    Args:
        parameters: the number of parameters of the model.
        computed: the share that FP8 GEMMs read.
        left: the other parameters that a GEMM or a convolution reads, the largest share first.
        embeddings: the share of embeddings and learned positions.
        other: the share of norms, biases and other vectors.
    """

    parameters: int
    computed: float
    left: tuple[Leftover, ...]
    embeddings: float
    other: float

    def __str__(self) -> str:
        totals = (("embeddings", self.embeddings), ("norms, biases and other vectors", self.other))
        rest = ", ".join(f"{name} {_percent(share)}" for name, share in totals if share)
        lines = [f"FP8 computes {_percent(self.computed)} of the parameters; left in high precision:"]
        return "\n  ".join([*lines, *map(str, self.left), rest or "nothing else"])


def find_coverage(model: nn.Module, computed: Collection[str]) -> Coverage:
    """The coverage of `model` if FP8 computes the layers `computed`.

    Args:
        model: on any device, meta included.
        computed: names of the linear layers whose `weight`, and of the stacks of experts that, FP8 GEMMs read.
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
    return _sum_up(uses.values(), embedded)


def _sum_up(uses: Collection[tuple[str, str, Tensor]], embedded: Collection[int]) -> Coverage:
    sizes: Counter[str] = Counter()
    groups: defaultdict[tuple[str, str, tuple[int, ...], bool], list[str]] = defaultdict(list)
    for name, kind, parameter in uses:
        sizes[kind] += parameter.numel()
        if _rank(kind) == 1:
            groups[_pattern(name), kind, tuple(parameter.shape), id(parameter) in embedded].append(name)
    total = max(sum(sizes.values()), 1)
    left = [
        Leftover(
            pattern if len(names) > 1 else names[0],
            kind,
            shape,
            len(names),
            len(names) * math.prod(shape) / total,
            tied,
        )
        for (pattern, kind, shape, tied), names in groups.items()
    ]
    left.sort(key=lambda entry: -entry.share)
    shares = [sizes[kind] / total for kind in (_COMPUTED, _EMBEDDING, _OTHER)]
    return Coverage(sum(sizes.values()), shares[0], tuple(left), shares[1], shares[2])


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
