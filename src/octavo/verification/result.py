"""The results of `octavo verify`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from octavo.evaluation.limits import Budget
from octavo.evaluation.metrics import Quality
from octavo.text import ReadReport
from octavo.verification.checks import Shape
from octavo.verification.files import Finding
from octavo.verification.readers import ReaderResult
from octavo.verification.sizes import Sizes


@dataclass(frozen=True)
class LayerReport:
    """One packed layer. None stands for a value that was not measured, or that the layer does not have.

    Attributes:
        spec: how it is quantized.
        shape: of its weight, [N, K].
        weight_sqnr: the SQNR of data * scale against MODEL's weight, in dB.
        output_sqnr: the SQNR of its output against the BF16 layer's, for the same inputs, over all prompts, in dB.
        clip_rate: the share of its inputs beyond the range of a stored input scale.
        headroom: that range over the largest input.
    """

    name: str
    spec: str
    shape: Shape
    weight_sqnr: float | None = None
    output_sqnr: float | None = None
    clip_rate: float | None = None
    headroom: float | None = None


@dataclass
class Report:
    """All results. Without findings the folder is right, and within its budgets.

    Attributes:
        packed, against: the folder, and the model that it was packed from (MODEL).
        architecture: the class of transformers that config.json names.
        data: the text that was read for the prompts.
        findings: everything that is wrong.
        readers: the programs that opened the folder.
        layers: the packed layers.
        quality, int8: of the packed model and of MODEL in INT8, against MODEL in BF16.
        sizes: in bytes.
        not_run: why nothing ran, or "".
        remarks: unusual things that are not errors.
    """

    packed: Path
    against: Path
    architecture: str = ""
    data: ReadReport | None = None
    findings: list[Finding] = field(default_factory=list)
    readers: list[ReaderResult] = field(default_factory=list)
    layers: list[LayerReport] = field(default_factory=list)
    quality: Quality | None = None
    int8: Quality | None = None
    sizes: Sizes | None = None
    not_run: str = ""
    remarks: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings


def over_budget(quality: Quality, budgets: Sequence[Budget]) -> list[Finding]:
    """One finding for each budget that is exceeded."""
    findings = []
    for budget in budgets:
        if not budget.holds(quality):
            measured = budget.show(budget.estimate(quality).value)
            findings.append(Finding("budget", budget.measure, f"{measured}, the limit is {budget.show(budget.limit)}"))
    return findings
