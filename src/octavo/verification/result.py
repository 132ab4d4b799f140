"""All that `octavo verify` found, and what a budget makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from octavo.evaluation.limits import Budget
from octavo.evaluation.metrics import Quality
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


def over_budget(quality: Quality | None, budgets: Sequence[Budget]) -> list[Finding]:
    """A finding for each budget that was exceeded."""
    findings: list[Finding] = []
    if quality is None:
        return findings
    for budget in budgets:
        if not budget.holds(quality):
            measured = budget.show(budget.estimate(quality).value)
            findings.append(Finding("budget", budget.measure, f"{measured}, the limit is {budget.show(budget.limit)}"))
    return findings
