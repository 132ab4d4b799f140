"""Streaming statistics of the tensors at one site, and the scales that follow from them.

The tensors are not stored, so everything that a rule for scales may need is computed from each batch:

    channel_amax[k] = max |x[.., k]|       history[i] = max |x| of batch i       histogram[c] = count of bf16(|x|) = c

The histogram has one bin for each BF16 magnitude: 128 bins per octave, over all octaves. So it needs no range in
advance, and the sum of two histograms is the histogram of both. It is exact for tensors in BF16. Rounding FP32 to BF16
keeps the order, so an order statistic of the rounded values is the rounded order statistic, within 2^-8 (0.39%) of the
true one for normal numbers. The same holds for percentiles, which interpolate between two neighbours as torch.quantile
does. The amax is always exact.

Scales multiply (x ≈ x_q * scale). The rules are amax; a percentile, above which elements saturate (Wu et al. 2020,
arXiv:2004.09602, section 5.2); and the least mean squared error on a geometric grid below amax.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from torch.utils.weak import WeakIdKeyDictionary

from octavo.hf.meta_model import ExpertMatrices
from octavo.numerics import scale_from_amax
from octavo.numerics.formats import E4M3, cast

BINS = 0x7F80  # the finite magnitudes of BF16: their bits count them, 0x7F80 is inf
PERCENTILES = (99.9, 99.99)
OUTLIER_MULTIPLE = 10.0
LEAVES = {"tokens", "channel_amax", "history", "histogram", "first_bin"}  # the tensors of a site in files
SCALE_RULES = ("amax", "percentile", "mse")


class Statistics:
    """The statistics of the tensors at one site, in FP32 for tensors of any dtype. `kind` is one of `KINDS`, and
    `layers` are the linear layers that read the site, in order. `tokens` is the number of vectors of K elements, and
    `channel_amax` is float32 [K]. `history` has the amax of each batch, oldest first."""

    def __init__(self, site: str, kind: str = "input", layers: Sequence[str] = ()) -> None:
        self.site, self.kind, self.layers = site, kind, list(layers)
        self.tokens = 0
        self.channel_amax = torch.empty(0)
        self.history: list[float] = []
        # The counts of the bins from `_first` on. Read from a file, they are those in use: experts have 10,000 sites.
        self._first, self._counts = 0, torch.zeros(0, dtype=torch.int64)

    @property
    def histogram(self) -> Tensor:
        """The number of elements with each BF16 magnitude, int64 [BINS]."""
        return pad(self._counts, (self._first, BINS - self._first - len(self._counts)))

    def update(self, x: Tensor) -> Self:
        """Count a batch x[.., K], a floating-point tensor on any device. A batch without tokens changes nothing. A
        ValueError, which names the site and the channel, for inf or NaN."""
        flat = x.detach().reshape(-1, x.shape[-1])
        if flat.numel() == 0:
            return self
        if flat.dtype != torch.bfloat16:
            flat = flat.float()
        channel_amax = flat.abs().amax(0).float()  # abs and amax both propagate NaN
        amax = float(channel_amax.max())
        if not math.isfinite(amax):
            channel = int((~channel_amax.isfinite()).nonzero()[0])
            raise ValueError(
                f"{self.site}: channel {channel} holds inf or NaN, and no scale follows from that: the weights are "
                "damaged, or the model overflows BF16"
            )
        codes = flat.bfloat16().view(torch.int16).flatten() & 0x7FFF
        batch = type(self)(self.site)
        batch.tokens, batch.channel_amax, batch.history = len(flat), channel_amax, [amax]
        batch._counts = torch.bincount(codes.clamp_(max=BINS - 1), minlength=BINS)  # the clamp: FP32 above BF16's max
        self.merge(batch)
        return self

    def merge(self, other: Self) -> None:
        """Add the statistics of `other`, as if its batches came after these. What passes a site keeps its width."""
        if not other.tokens:
            return
        if self.tokens == 0:
            self.channel_amax, self._first, self._counts = other.channel_amax.clone(), 0, other.histogram
        else:
            self.channel_amax = torch.maximum(self.channel_amax, other.channel_amax)
            self._first, self._counts = 0, self.histogram + other.histogram
        self.tokens += other.tokens
        self.history += other.history

    @property
    def amax(self) -> float:
        self._require_tokens()
        return float(self.channel_amax.max())

    def percentile(self, percent: float) -> float:
        """The magnitude that `percent` of the elements do not exceed, within 0.39% of torch.quantile of |x|.

        It is exact for tensors in BF16, and linear between the two nearest order statistics.
        """
        self._require_tokens()
        if not 0 <= percent <= 100:
            raise ValueError(f"a percentile must be between 0 and 100, got {percent}")
        below = self.histogram.cumsum(0)
        rank = percent / 100 * (int(below[-1]) - 1)
        ranks = torch.tensor([math.floor(rank), math.ceil(rank)], device=below.device)
        low, high = _magnitudes(below.device)[torch.searchsorted(below, ranks, right=True)].tolist()
        return float(low + (high - low) * (rank - math.floor(rank)))

    def outlier_channels(self, multiple: float = OUTLIER_MULTIPLE) -> Tensor:
        """Indices, int64 [n], of the channels whose amax exceeds `multiple` times the median channel's."""
        self._require_tokens()
        return (self.channel_amax > multiple * self.channel_amax.median()).nonzero().flatten()

    def scale(self, rule: str = "amax", percentile: float = PERCENTILES[-1]) -> Tensor:
        """A static scale for e4m3 (x ≈ x_q * scale), float32 with no dimension, finite and positive.

        `rule` is "amax"; "percentile"; or "mse", the least mean squared error over amax/448 * 2^(-i/8), i = 0..40. A
        ValueError for an unknown rule, no tokens, or a percentile that is 0 where amax is not.
        """
        if rule not in SCALE_RULES:
            raise ValueError(f"unknown rule {rule!r} for a scale: choose one of {', '.join(SCALE_RULES)}")
        if rule == "mse":
            return self._mse_scale()
        chosen = self.amax if rule == "amax" else self.percentile(percentile)
        if chosen == 0 and self.amax > 0:
            raise ValueError(
                f"{self.site}: {percentile}% of the elements are 0, and a scale for them would clip all others: "
                "take a higher percentile or the rule amax"
            )
        return scale_from_amax(torch.tensor(chosen), E4M3)

    def in_use(self) -> tuple[Tensor, Tensor]:
        """The magnitudes that were seen, ascending, float32, and how often each was, float64, on the CPU."""
        histogram = self.histogram.cpu()
        bins = histogram.nonzero().flatten()
        return _magnitudes(bins.device)[bins], histogram[bins].double()

    def _mse_scale(self) -> Tensor:
        x, counts = self.in_use()
        steps = torch.arange(5 * 8 + 1, dtype=torch.float64) / 8  # five octaves, each in eight steps
        grid = scale_from_amax((self.amax / 2**steps).float(), E4M3)
        errors = [(counts * (x - cast(x / s, E4M3).float() * s).double().square()).sum() for s in grid]
        return grid[int(torch.stack(errors).argmin())]

    def _require_tokens(self) -> None:
        if self.tokens == 0:
            raise ValueError(f"{self.site} saw no token, so it has no statistics: give other data")

    def to_tensors(self) -> dict[str, Tensor]:
        """The statistics as tensors on the CPU: tokens int64 [], channel_amax float32 [K], history float32 [batches],
        and the bins of the histogram from the first in use to the last, int64 [bins], with `first_bin` int64 []."""
        histogram = self.histogram.cpu()
        used = histogram.nonzero().flatten()
        first, last = (int(used[0]), int(used[-1])) if len(used) else (0, -1)
        return {
            "tokens": torch.tensor(self.tokens),
            "channel_amax": self.channel_amax.cpu(),
            "history": torch.tensor(self.history, dtype=torch.float32),
            "histogram": histogram[first : last + 1].clone(),
            "first_bin": torch.tensor(first),
        }

    @classmethod
    def from_tensors(cls, site: str, tensors: Mapping[str, Tensor], kind: str, layers: Sequence[str]) -> Self:
        """The inverse of `to_tensors`. A ValueError for missing, negative or infinite tensors, or other totals."""
        made = cls(site, kind, layers)
        if missing := LEAVES - tensors.keys():
            raise ValueError(f"the statistics of {site} lack {', '.join(sorted(missing))}")
        made.tokens, first = int(tensors["tokens"]), int(tensors["first_bin"])
        made.channel_amax, counts = tensors["channel_amax"].clone(), tensors["histogram"]
        made.history = tensors["history"].tolist()
        amax, total = made.channel_amax, int(counts.sum())
        sound = amax.ndim == counts.ndim == 1 and bool((counts >= 0).all()) and 0 <= first <= BINS - len(counts)
        sound = sound and bool(amax.isfinite().all() and (amax >= 0).all()) and total == made.tokens * len(amax)
        if not sound or (made.tokens and max(made.history, default=-1.0) != made.amax):
            raise ValueError(f"the statistics of {site} contradict themselves: the file is damaged, calibrate again")
        made._first, made._counts = first, counts
        return made


def _magnitudes(device: torch.device) -> Tensor:
    """The BF16 magnitude of each bin, float32 [BINS]."""
    return torch.arange(BINS, dtype=torch.int16, device=device).view(torch.bfloat16).float()


# ---- Observing the tensors of a model while it runs in BF16.
#
#     x -> norm -> y -> q_proj, k_proj, v_proj -> rotary -> Q K V -> attention -> z -> o_proj -> ...
#             |    |                                     | | |                 |
#      NORM.output Q_PROJ.input (of all three)     ATTN.q .k .v        O_PROJ.input
#
# A site is one tensor of the computation. Linear layers that read the same tensor (query, key and value; gate and up)
# share the site of the first of them, because one tensor has one scale, and readers that fuse such layers need one
# scale. Queries, keys and values are observed after the rotation and before the heads of keys are repeated. For this an
# entry in transformers' registry of attention functions observes its arguments and calls "sdpa", or the model's own
# function where sdpa does not compute it (the softcap of Gemma 2).
#
# Each expert of a mixture has two sites: the input of its gate and up matrices, which is the tokens that the router
# chose it for, and the input of its down matrix, which is computed here a second time. The sites of an expert without a
# token saw none.


KINDS = ("input", "norm", "query", "key", "value")
_ATTENTION = "octavo_observe"
_NORMS = ("RMSNorm", "LayerNorm")  # transformers has a class for each model


class Observer:
    """Collects statistics of a model of transformers inside a `watch` block, for the batches of `looking` blocks.
    `linears` are the layers that packing would pack; `experts` has the matrices of each module of experts, by their
    names in the files."""

    def __init__(self, model: Any, linears: Sequence[str], experts: Mapping[str, Sequence[ExpertMatrices]]) -> None:
        self._model, self._experts = model, experts
        self._names = {id(module): name for name, module in model.named_modules()}
        self._linears = set(linears)
        self._found: dict[str, Statistics] = {}
        self._looking = False
        self._measured: Any = WeakIdKeyDictionary()  # tensor -> _Measured

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Install the hooks and the attention function in this block."""
        with ExitStack() as hooks:
            for name, module in self._model.named_modules():
                if name in self._linears:
                    hook = module.register_forward_pre_hook(partial(self._before_linear, name), with_kwargs=True)
                elif name in self._experts:
                    hook = module.register_forward_pre_hook(partial(self._before_experts, self._experts[name]))
                elif isinstance(module, nn.LayerNorm | nn.RMSNorm) or type(module).__name__.endswith(_NORMS):
                    hook = module.register_forward_hook(partial(self._after_norm, name))
                else:
                    continue
                hooks.enter_context(hook)
            hooks.enter_context(_attention(self._model, self._attention))
            yield

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Observe the tensors in this block, in which one batch passes one part of the model."""
        self._looking = True
        try:
            yield
        finally:
            self._looking = False
            self._measured.clear()

    def take(self) -> dict[str, Statistics]:
        """The sites observed since the last call, by name."""
        found, self._found = self._found, {}
        return found

    def _before_linear(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._looking:
            return
        x, site = args[0] if args else kwargs["input"], f"{name}.input"
        measured = self._measure(x, site)
        if not measured.site:
            measured.site = site
            self._see(site, "input", x)
        if name not in (layers := self._found[measured.site].layers):
            layers.append(name)

    def _before_experts(self, experts: Sequence[ExpertMatrices], module: Any, args: tuple[Tensor, ...]) -> None:
        x, index, _ = args
        for e, names in enumerate(experts) if self._looking else ():
            n = x[(index == e).any(1)]
            gate, up = linear(n, module.gate_up_proj[e]).chunk(2, -1)
            self._see(f"{names.gate}.input", "input", n, (names.gate, names.up))
            self._see(f"{names.down}.input", "input", module.act_fn(gate) * up, (names.down,))

    def _after_norm(self, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self._looking:
            self._see(f"{name}.output", "norm", output)

    def _attention(
        self, attend: Callable[..., Any], module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        if self._looking:
            name = self._names[id(module)]
            for kind, x in (("query", query), ("key", key), ("value", value)):  # [B, heads, T, d]
                self._see(f"{name}.{kind[0]}", kind, x.transpose(1, 2).flatten(2))  # [B, T, heads * d]
        return attend(module, query, key, value, *args, **kwargs)

    def _see(self, site: str, kind: str, x: Tensor, layers: Sequence[str] = ()) -> None:
        found = self._found.setdefault(site, Statistics(site, kind, layers))
        found.merge(self._measure(x, site).statistics)

    def _measure(self, x: Tensor, site: str) -> _Measured:
        """The statistics of x. A norm's output is often a linear layer's input: a tensor is counted once, while it
        exists and is not written to."""
        measured: _Measured | None = self._measured.get(x)
        if measured is None or measured.version != x._version:
            measured = self._measured[x] = _Measured(x._version, Statistics(site).update(x))
        return measured


@dataclass(eq=False)
class _Measured:
    """The statistics of one tensor, and its site where linear layers read it."""

    version: int
    statistics: Statistics
    site: str = ""


@contextmanager
def _attention(model: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Let `model` attend by `function`, which is given sdpa, or eager if transformers opens the model so, and gets the
    masks of that."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    functions: Any = ALL_ATTENTION_FUNCTIONS
    before = model.config._attn_implementation
    kind = "eager" if before == "eager" else "sdpa"
    functions[_ATTENTION] = partial(function, _eager if kind == "eager" else functions["sdpa"])
    AttentionMaskInterface.register(_ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS[kind])
    try:
        model.set_attn_implementation(_ATTENTION)
        yield
    finally:
        model.set_attn_implementation(before)
        del functions[_ATTENTION]


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The eager attention of transformers, of which the file of each model has one."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


def check_seen(found: dict[str, Statistics], linears: Sequence[str], where: str) -> None:
    """Raise a ValueError unless each of `linears` read one site, which saw a token. `where` names what has run."""
    sites: dict[str, list[str]] = {}
    for site, statistics in found.items():
        for layer in statistics.layers if statistics.tokens else ():
            sites.setdefault(layer, []).append(site)
    if blind := [name for name in linears if name not in sites]:
        raise ValueError(
            f"{blind[0]} saw no token in all of the data ({len(blind)} layers of {where}): a scale for it would be a "
            "guess. Give more or other data, so that every layer (every expert) is used"
        )
    if torn := [name for name in linears if len(sites[name]) > 1]:
        raise ValueError(
            f"{torn[0]} shares its input with another layer in some batches and not in others "
            f"({', '.join(sites[torn[0]])}): such a model cannot be calibrated"
        )
