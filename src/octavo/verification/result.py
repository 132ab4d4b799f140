"""All that `octavo verify` found, and what a budget makes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from octavo.evaluation.metrics import EmbeddingQuality, LogitQuality, Quality
from octavo.text import ReadReport
from octavo.verification.checks import Shape
from octavo.verification.files import Finding
from octavo.verification.readers import Consumer
from octavo.verification.sizes import Sizes


@dataclass(frozen=True)
class LayerReport:
    """One packed layer; None is what was not measured, or is not there.

    Attributes:
        weight_sqnr: data * scale against MODEL's weight, in dB.
        output_sqnr: the layer's output against the BF16 layer's, on the same inputs, over all prompts, in dB.
        clip_rate: the part of the inputs beyond the range of a stored input scale.
        headroom: that range over the largest input seen.
    """

    name: str
    words: str
    shape: Shape
    weight_sqnr: float | None
    output_sqnr: float | None
    clip_rate: float | None
    headroom: float | None


@dataclass
class Report:
    """All that was found. `findings` empty means that the folder is right, and within the budget. `architecture` is
    the class of transformers that config.json names."""

    packed: Path
    against: Path
    architecture: str = ""
    data: ReadReport | None = None
    findings: list[Finding] = field(default_factory=list)
    consumers: list[Consumer] = field(default_factory=list)
    layers: list[LayerReport] = field(default_factory=list)
    quality: Quality | None = None
    int8: Quality | None = None
    sizes: Sizes | None = None
    not_run: str = ""
    remarks: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings


@dataclass(frozen=True)
class Budget:
    """The most that packing may cost: nats of KL a token, the fraction by which perplexity may rise, and of an encoder
    the least that the mean cosine may be; None: anything."""

    kl: float | None = None
    perplexity: float | None = None
    cosine: float | None = None

    @property
    def of_logits(self) -> bool:
        """Whether something is asked that a language model alone has."""
        return self.kl is not None or self.perplexity is not None


def over_budget(quality: Quality | None, budget: Budget) -> list[Finding]:
    """A finding for each budget that was exceeded."""
    findings: list[Finding] = []
    if isinstance(quality, EmbeddingQuality):
        found, least = quality.cosine.value, budget.cosine
        if least is not None and not found >= least:
            findings.append(Finding("budget", "cosine", f"{found:.5f} in the mean, {least:g} was the least allowed"))
    if not isinstance(quality, LogitQuality):
        return findings
    kl, ppl = quality.kl.value, quality.perplexity_ratio.value
    if budget.kl is not None and not kl <= budget.kl:
        findings.append(Finding("budget", "kl", f"{kl:.4g} nats a token, {budget.kl:g} were allowed"))
    if budget.perplexity is not None and not ppl <= budget.perplexity:
        findings.append(Finding("budget", "ppl", f"{ppl:+.3%}, {budget.perplexity:.3%} were allowed"))
    return findings
