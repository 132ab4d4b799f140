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

import math
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from octavo.numerics import scale_from_amax
from octavo.numerics.codec import cast
from octavo.numerics.formats import E4M3

BINS = 0x7F80  # the finite magnitudes of BF16: their bits count them, 0x7F80 is inf
PERCENTILES = (99.9, 99.99)
OUTLIER_MULTIPLE = 10.0
SCALE_RULES = ("amax", "percentile", "mse")
_GRID_STEPS, _GRID_OCTAVES = 8, 5


class Statistics:
    """The statistics of the tensors at one site, in FP32 for tensors of any dtype.

    Attributes:
        site: the name, for messages.
        tokens: the number of vectors of K elements seen.
        channel_amax: float32 [K], empty before the first token.
        history: the amax of each batch, oldest first.
        histogram: int64 [BINS], the number of elements with each BF16 magnitude.
    """

    def __init__(self, site: str) -> None:
        self.site = site
        self.tokens = 0
        self.channel_amax = torch.empty(0)
        self.history: list[float] = []
        self.histogram = torch.zeros(BINS, dtype=torch.int64)

    # --- Updates ---------------------------------------------------------------------------------------------------

    def update(self, x: Tensor) -> Self:
        """Count a batch x[.., K], a floating-point tensor on any device. A batch without tokens changes nothing.

        Raises:
            ValueError: x holds inf or NaN; the message names the site and the channel.
        """
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
        counts = torch.bincount(codes.clamp_(max=BINS - 1), minlength=BINS)  # the clamp: FP32 above BF16's max
        self._add(flat.shape[0], channel_amax, [amax], counts)
        return self

    def merge(self, other: Self) -> Self:
        """Add the statistics of `other`, as if its batches came after these."""
        if other.tokens:
            self._add(other.tokens, other.channel_amax, other.history, other.histogram)
        return self

    def _add(self, tokens: int, channel_amax: Tensor, history: list[float], histogram: Tensor) -> None:
        if self.tokens == 0:
            self.channel_amax, self.histogram = channel_amax.clone(), histogram.clone()
        elif self.channel_amax.shape != channel_amax.shape:
            raise ValueError(
                f"{self.site} has {len(self.channel_amax)} channels, got a tensor with {len(channel_amax)}: "
                "what passes a site must keep its width"
            )
        else:
            self.channel_amax = torch.maximum(self.channel_amax, channel_amax)
            self.histogram = self.histogram + histogram
        self.tokens += tokens
        self.history += history

    # --- Results ---------------------------------------------------------------------------------------------------

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

    def clip_rate(self, scale: float | Tensor) -> float:
        """The share of elements that saturate in e4m3 with this scale: |x| > scale * 448.

        It is exact for tensors in BF16. For others, elements within 0.39% of the limit may count on either side.
        """
        self._require_tokens()
        if not 0 < float(scale) < math.inf:
            raise ValueError(f"{self.site}: a scale must be positive and finite, got {float(scale)}")
        limit = float(scale) * E4M3.max * (1 + 2.0**-23)  # so that amax/448, rounded to float32, does not clip amax
        if self.amax <= limit:
            return 0.0
        clipped = self.histogram[_magnitudes(self.histogram.device) > limit].sum()
        return int(clipped) / int(self.histogram.sum())

    def outlier_channels(self, multiple: float = OUTLIER_MULTIPLE) -> Tensor:
        """Indices, int64 [n], of the channels whose amax exceeds `multiple` times the median channel's."""
        self._require_tokens()
        return (self.channel_amax > multiple * self.channel_amax.median()).nonzero().flatten()

    def scale(self, rule: str = "amax", percentile: float = PERCENTILES[-1]) -> Tensor:
        """A static scale for e4m3 (x ≈ x_q * scale), float32 with no dimension, finite and positive.

        Args:
            rule: "amax"; "percentile"; or "mse", the least mean squared error over amax/448 * 2^(-i/8), i = 0..40.
            percentile: in percent, for that rule.

        Raises:
            ValueError: an unknown rule, no tokens, or a percentile that is 0 where amax is not.
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

    def _mse_scale(self) -> Tensor:
        seen = self.histogram.cpu().nonzero().flatten()
        x, counts = _magnitudes(torch.device("cpu"))[seen], self.histogram.cpu()[seen].double()
        steps = torch.arange(_GRID_STEPS * _GRID_OCTAVES + 1, dtype=torch.float64) / _GRID_STEPS
        grid = scale_from_amax((self.amax / 2**steps).float(), E4M3)
        errors = [(counts * (x - cast(x / s, E4M3).float() * s).double().square()).sum() for s in grid]
        return grid[int(torch.stack(errors).argmin())]

    def _require_tokens(self) -> None:
        if self.tokens == 0:
            raise ValueError(f"{self.site} saw no token, so it has no statistics: give other data")

    # --- As tensors ------------------------------------------------------------------------------------------------

    def to_tensors(self) -> dict[str, Tensor]:
        """The statistics as tensors on the CPU: tokens int64 [], channel_amax float32 [K], history float32 [batches],
        and the bins of the histogram from the first in use to the last, int64 [bins], with `first_bin` int64 []."""
        used = self.histogram.cpu().nonzero().flatten()
        first, last = (int(used[0]), int(used[-1])) if len(used) else (0, -1)
        return {
            "tokens": torch.tensor(self.tokens),
            "channel_amax": self.channel_amax.cpu(),
            "history": torch.tensor(self.history, dtype=torch.float32),
            "histogram": self.histogram[first : last + 1].cpu(),
            "first_bin": torch.tensor(first),
        }

    @classmethod
    def from_tensors(cls, site: str, tensors: Mapping[str, Tensor]) -> Self:
        """The inverse of `to_tensors`.

        Raises:
            ValueError: tensors are missing, negative or not finite, or their totals differ.
        """
        made = cls(site)
        if missing := made.to_tensors().keys() - tensors.keys():
            raise ValueError(f"the statistics of {site} lack {', '.join(sorted(missing))}")
        made.tokens, first = int(tensors["tokens"]), int(tensors["first_bin"])
        made.channel_amax, counts = tensors["channel_amax"].clone(), tensors["histogram"]
        made.history = tensors["history"].tolist()
        amax, total = made.channel_amax, int(counts.sum())
        sound = amax.ndim == counts.ndim == 1 and bool((counts >= 0).all()) and 0 <= first <= BINS - len(counts)
        sound = sound and bool(amax.isfinite().all() and (amax >= 0).all()) and total == made.tokens * len(amax)
        if not sound or (made.tokens and max(made.history, default=-1.0) != made.amax):
            raise ValueError(f"the statistics of {site} contradict themselves: the file is damaged, calibrate again")
        made.histogram[first : first + len(counts)] = counts
        return made


def _magnitudes(device: torch.device) -> Tensor:
    """The BF16 magnitude of each bin, float32 [BINS]."""
    return torch.arange(BINS, dtype=torch.int16, device=device).view(torch.bfloat16).float()
