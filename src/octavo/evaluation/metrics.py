"""The difference between the outputs of two models on prompts: KL, top-1 agreement, perplexity; for encoders, cosine.

    kl(t)  = sum_v p(v) (log p(v) - log q(v))     p of the reference, q of the candidate, of token t, in nats
    ppl    = exp(sum nll / tokens)                nll of the next token; the last token of a prompt has none

Prompts are drawn independently, and the tokens of one prompt are not. So an interval treats each prompt as one draw: a
mean over tokens is a ratio of sums over prompts, r = sum a / sum n. Its variance is that of the residuals a - r n
(Cochran, Sampling Techniques, 6.4), and the interval is that of Student's t. Two models are compared on the same
prompts, so a ratio of perplexities has the interval of the paired difference, which is far narrower than that of
either.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor

Outputs = Callable[[Tensor], Tensor]
"""ids int64 [B, T] -> logits (or, of an encoder, hidden states) [B, T, width], on any device, in any floating dtype."""

_ROWS = 256  # tokens whose float64 distributions are in memory at once


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval over prompts. One prompt alone gives no interval (None)."""

    value: float
    low: float | None
    high: float | None

    def mapped(self, function: Callable[[float], float]) -> Estimate:
        """The estimate of an increasing function of the quantity."""
        low, high = (None if edge is None else function(edge) for edge in (self.low, self.high))
        return Estimate(function(self.value), low, high)


@dataclass(frozen=True)
class LogitQuality:
    """A language model compared with a reference on the same tokens."""

    kl: Estimate  # from the reference's distribution to the candidate's, in nats a token
    top1: Estimate  # the share of tokens after which both models find the same token most likely
    perplexity: Estimate
    reference_perplexity: Estimate
    perplexity_ratio: Estimate  # minus 1, so 0.005 is half a percent worse; paired by prompt
    prompts: int
    tokens: int


@dataclass(frozen=True)
class EmbeddingQuality:
    """An encoder against a reference: the mean and the `least` cosine of mean-pooled hidden states, over prompts."""

    cosine: Estimate
    least: float
    prompts: int
    tokens: int


Quality = LogitQuality | EmbeddingQuality


class LogitSums:
    """The sums of `LogitQuality`, for a caller that has the logits of both models."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, ...]] = []  # of each prompt: kl, agreeing, nll and reference nll, tokens, targets

    def add(self, ids: Tensor, reference: Tensor, candidate: Tensor) -> None:
        """Add a batch: ids int64 [B, T] of two tokens or more, logits of the two models [B, T, V]."""
        for prompt, p, q in zip(ids, reference, candidate, strict=True):
            self._rows.append(_sums(prompt.to(p.device), p, q.to(p.device)))

    def quality(self) -> LogitQuality:
        """The quality over all batches, of which there must be one."""
        kl, agree, nll, before, tokens, targets = zip(*self._rows, strict=True)
        change = [a - b for a, b in zip(nll, before, strict=True)]
        return LogitQuality(
            kl=ratio(kl, tokens).mapped(lambda nats: max(nats, 0.0)),
            top1=ratio(agree, tokens).mapped(lambda share: min(max(share, 0.0), 1.0)),
            perplexity=ratio(nll, targets).mapped(_exp),
            reference_perplexity=ratio(before, targets).mapped(_exp),
            perplexity_ratio=ratio(change, targets).mapped(lambda nats: _exp(nats) - 1),
            prompts=len(self._rows),
            tokens=int(sum(tokens)),
        )


class EmbeddingSums:
    """The sums of `EmbeddingQuality`, for a caller that has the hidden states of both models."""

    def __init__(self) -> None:
        self._cosines: list[float] = []
        self._tokens = 0

    def add(self, ids: Tensor, reference: Tensor, candidate: Tensor) -> None:
        """Add a batch: ids int64 [B, T], last hidden states of the two models [B, T, width]."""
        a, b = (hidden.double().mean(1) for hidden in (reference, candidate.to(reference.device)))
        self._cosines += torch.nn.functional.cosine_similarity(a, b, dim=-1).tolist()
        self._tokens += ids.numel()

    def quality(self) -> EmbeddingQuality:
        """The quality over all batches, of which there must be one."""
        count = len(self._cosines)
        mean = ratio(self._cosines, [1.0] * count).mapped(lambda cosine: min(cosine, 1.0))
        return EmbeddingQuality(mean, min(self._cosines), count, self._tokens)


@torch.inference_mode()
def compare_many(
    reference: Outputs,
    candidates: Mapping[str, Outputs],
    batches: Iterable[Tensor],
    gather: type[LogitSums] | type[EmbeddingSums],
) -> dict[str, Quality]:
    """Compare several candidates with a reference, which runs once: the quality of each over all batches."""
    sums = {name: gather() for name in candidates}
    for ids in batches:
        truth = reference(ids)
        for name, candidate in candidates.items():
            sums[name].add(ids, truth, candidate(ids))
    return {name: gathered.quality() for name, gathered in sums.items()}


def sqnr(signal: float, noise: float) -> float:
    """10 log10(signal / noise) in dB of two energies. Infinite without noise, NaN if an energy is not finite."""
    if math.isnan(signal) or math.isnan(noise) or math.isinf(signal):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal and noise < math.inf else -math.inf


def energies(reference: Tensor, candidate: Tensor) -> tuple[float, float]:
    """The energies of the reference and of the candidate's difference from it, in float64, for `sqnr`."""
    exact = reference.double()
    return float(exact.square().sum()), float((candidate.double() - exact).square().sum())


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """The log-probabilities of tokens, float64 [...], by their rows of logits [..., V]."""
    rows = zip(torch.split(logits.flatten(0, -2), _ROWS), torch.split(tokens.flatten(), _ROWS), strict=True)
    found = [part.double().log_softmax(-1).gather(1, t.to(part.device)[:, None])[:, 0] for part, t in rows]
    return torch.cat(found).view(tokens.shape)


def divergences(p: Tensor, q: Tensor) -> Tensor:
    """The KL from p to q in nats [...], of log-probabilities [..., V]."""
    # Where p is 0 its term is 0, though its logarithm may be -inf.
    return torch.where(p.isneginf(), 0.0, p.exp() * (p - q)).sum(-1)


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """The ratio sum a / sum n over prompts, with its interval."""
    count, total = len(numerators), math.fsum(denominators)
    value = math.fsum(numerators) / total
    if count < 2 or not math.isfinite(value):
        return Estimate(value, None, None)
    squares = math.fsum((a - value * n) ** 2 for a, n in zip(numerators, denominators, strict=True))
    error = math.sqrt(squares * count / (count - 1)) / total
    half = student_quantile(count - 1) * error
    return Estimate(value, value - half, value + half)


@cache
def student_quantile(freedom: int, outside: float = 0.05) -> float:
    """The t of a two-sided interval: Student's distribution has the share `outside` outside of (-t, t)."""
    steps = 1 << 52  # of the angle
    step = math.pi / 2 / steps
    place = bisect_left(range(steps), 1 - outside, key=lambda place: _student_within(step * place, freedom))
    return math.sqrt(freedom) * math.tan(step * place)


def _student_within(angle: float, freedom: int) -> float:
    """The probability of (-t, t) by the angle atan(t / sqrt(freedom)) (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    cosine = math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    for k in range(2 if odd else 1, freedom - 2, 2):
        term *= cosine**2 * k / (k + 1)
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if freedom > 1 else 0))


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def _sums(prompt: Tensor, reference: Tensor, candidate: Tensor) -> tuple[float, ...]:
    """kl, agreeing tokens, nll, the reference's nll, tokens and targets of one prompt [T], logits [T, V]."""
    kl = agree = nll = before = 0.0
    last = len(prompt) - 1
    for start in range(0, len(prompt), _ROWS):
        p, q = (logits[start : start + _ROWS].double().log_softmax(-1) for logits in (reference, candidate))
        kl += float(divergences(p, q).sum())
        agree += float((p.argmax(-1) == q.argmax(-1)).sum())
        targets = prompt[start + 1 : min(start + _ROWS, last) + 1].unsqueeze(1)
        before -= float(p[: len(targets)].gather(1, targets).sum())
        nll -= float(q[: len(targets)].gather(1, targets).sum())
    return kl, agree, nll, before, float(len(prompt)), float(last)


_RANGES = {
    "kl": "nats a token above 0, such as 0.01",
    "ppl": "a percentage above 0% and up to 100%, such as 0.5%, or a fraction below 1, such as 0.005",
    "cosine": "above 0 and below 1, such as 0.999",
}


@dataclass(frozen=True)
class Budget:
    """A limit on one measure of quality.

    Attributes:
        measure: "kl" (KL divergence from the model in BF16, nats a token), "ppl" (relative rise of perplexity), or for
            encoders "cosine" (mean cosine of the mean-pooled last hidden states).
        limit: the most KL, the largest rise of perplexity (0.005 is half a percent), or the least cosine.
    """

    measure: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read kl=0.01, ppl=0.005 (or ppl=0.5%, which is the same) or cosine=0.999. A ValueError for another measure,
        or a limit that is not a number in the measure's range."""
        measure, _, limit = text.partition("=")
        if measure not in _RANGES:
            raise ValueError(
                "a budget reads kl=0.01 (nats a token) or ppl=0.5% (perplexity, relative), and for an encoder "
                f"cosine=0.999, got {text!r}"
            )
        percent = measure == "ppl" and limit.endswith("%")
        try:
            value = float(limit.removesuffix("%")) / 100 if percent else float(limit)
        except ValueError:
            value = math.nan
        upper = math.inf if measure == "kl" else 1
        if not (0 < value < upper or (percent and value == 1)):
            raise ValueError(f"the budget {measure} must be {_RANGES[measure]}; got {limit!r}")
        return cls(measure, value)

    @property
    def of_logits(self) -> bool:
        """True if the measure is for language models, False if it is for encoders."""
        return self.measure != "cosine"

    def estimate(self, quality: Quality) -> Estimate:
        if not isinstance(quality, LogitQuality):
            return quality.cosine
        return quality.kl if self.measure == "kl" else quality.perplexity_ratio

    def holds(self, quality: Quality) -> bool:
        value = self.estimate(quality).value
        return value <= self.limit if self.of_logits else value >= self.limit

    def show(self, value: float) -> str:
        """A value of the measure for a message, such as kl=0.01."""
        return f"{self.measure}={self._number(value)}"

    def show_estimate(self, estimate: Estimate) -> str:
        if estimate.low is None or estimate.high is None:
            return self.show(estimate.value)
        return f"{self.show(estimate.value)} ({self._number(estimate.low)} to {self._number(estimate.high)})"

    def _number(self, value: float) -> str:
        return f"{value:.3%}" if self.measure == "ppl" else f"{value:.{4 if self.of_logits else 6}g}"


def check_budgets(budgets: Sequence[Budget], *, language_model: bool) -> None:
    """Raise a ValueError unless every budget is for a model of this kind."""
    if any(budget.of_logits != language_model for budget in budgets):
        raise ValueError(
            "budgets of kl and ppl are for language models, those of cosine for encoders: the model is "
            f"{'a language model' if language_model else 'an encoder'}"
        )
