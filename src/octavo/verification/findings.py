"""The findings of `octavo verify`: a report that renders itself, as a dictionary for JSON and as tables of text."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octavo.data import ReadReport
from octavo.evaluation.metrics import EmbeddingQuality, Estimate, LogitQuality, Quality
from octavo.rates.measured import speeds_note
from octavo.util import Table, finite, installed, plural
from octavo.verification.checks import Shape
from octavo.verification.layer_spec import LayerSpec
from octavo.verification.readers import ReaderResult
from octavo.verification.stored_files import CheckpointFiles, Finding
from octavo.version import __version__

_PACKAGES = ("torch", "transformers", "compressed-tensors", "vllm")


def measure_sizes(files: CheckpointFiles, layers: Mapping[str, LayerSpec]) -> dict[str, int]:
    """The bytes of the packed layers, scales included, and of all tensors, each beside the same in BF16."""
    scales = [f"{name}.{spec.scale}" for name, spec in layers.items()]
    scales += [f"{name}.{spec.input_scale}" for name, spec in layers.items() if spec.inputs == "static"]
    weights = [f"{name}.weight" for name in layers]
    packed = sum(files.nbytes(name) for name in (*weights, *scales))
    packed_bf16 = 2 * sum(files.nbytes(name) for name in weights)  # a packed weight has one byte an element
    whole = sum(files.nbytes(name) for name in files.shapes)
    return {"packed": packed, "packed_bf16": packed_bf16, "whole": whole, "whole_bf16": whole - packed + packed_bf16}


@dataclass(frozen=True)
class LayerReport:
    """One packed layer. None stands for a value that was not measured, or that the layer does not have."""

    name: str
    spec: str  # how it is quantized
    shape: Shape  # of its weight, [N, K]
    weight_sqnr: float | None = None  # of data * scale against MODEL's weight, in dB
    output_sqnr: float | None = None  # of its output against the BF16 layer's, for the same inputs of all prompts
    clip_rate: float | None = None  # the share of its inputs beyond the range of a stored input scale
    headroom: float | None = None  # that range over the largest input


def invocation_of(command: str) -> dict[str, Any]:
    """The time (UTC, ISO 8601), the command and the package versions that a report is made with."""
    versions = {name: version for name in _PACKAGES if (version := installed(name))}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": date, "command": command, "versions": {"octavo": __version__} | versions}


@dataclass
class Report:
    """All results. Without findings the folder is right, and within its budgets."""

    packed: Path  # the folder
    against: Path | None = None  # the model that it was packed from (MODEL), if it was compared with that
    architecture: str = ""  # the class of transformers that config.json names
    data: ReadReport | None = None  # the text that was read for the prompts
    findings: list[Finding] = field(default_factory=list)  # everything that is wrong
    readers: list[ReaderResult] = field(default_factory=list)  # the programs that opened the folder
    layers: list[LayerReport] = field(default_factory=list)  # that are packed
    quality: Quality | None = None  # of the packed model, against MODEL in BF16
    int8: Quality | None = None  # of MODEL in INT8, against MODEL in BF16
    sizes: Mapping[str, int] | None = None  # of `measure_sizes`
    not_run: str = ""  # why nothing ran
    remarks: list[str] = field(default_factory=list)  # unusual things that are not errors

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def verdict(self) -> str:
        if not self.ok:
            count, why = len(self.findings), f"; {self.not_run}" if self.not_run else ""
            return f"{plural(count, 'thing')} {'is' if count == 1 else 'are'} wrong{why}"
        agreeing = [reader.name for reader in self.readers if reader.outcome == "agrees"]
        readers = f"{', '.join(agreeing)} {'agrees' if len(agreeing) == 1 else 'agree'} with them"
        compared = any(layer.weight_sqnr is not None for layer in self.layers)
        found = "the bytes are right" if compared else "no fault in the folder by itself, and no weight was compared"
        return f"{found}; {readers if agreeing else 'no reader was tried'}"

    def to_dict(self, invocation: Mapping[str, Any]) -> dict[str, Any]:
        """The report for JSON. JSON has no inf and no NaN, so they become None."""
        fields = {**invocation, "octavo_version": __version__, "ok": self.ok, **asdict(self)}
        fields |= {"model": fields.pop("architecture"), "bytes": fields.pop("sizes"), "packed": str(self.packed)}
        fields |= {"against": self.against and str(self.against), "not_run": self.not_run or None}
        return finite(fields | {"data": self.data and self.data.to_dict()})

    def tables(self) -> Iterator[Table]:
        """The tables that have rows, without the columns that are empty in every row. Findings are not in a table."""
        for table in (_readers(self), _quality(self), _layers(self), _sizes(self)):
            if table.rows:
                used = [i for i in range(len(table.columns)) if any(row[i] for row in table.rows)]
                rows = [tuple(row[i] for i in used) for row in table.rows]
                yield table._replace(columns=tuple(table.columns[i] for i in used), rows=rows)


def _readers(report: Report) -> Table:
    rows = [
        (
            f"{reader.name} {reader.version}".strip(), reader.outcome, _number(reader.distance, "{:.3%}"),
            _number(reader.tolerance, "{:.3%}"), reader.note,
        )
        for reader in report.readers
    ]  # fmt: skip
    remark = (
        "Distance between a reader's outputs and those of the bytes in float32, relative to their size. The allowed "
        "distance follows from how far rounding alone moves the outputs on the same prompts."
    )
    return Table("Readers", ("reader", "outcome", "distance", "allowed", ""), rows, (), ("",), remark)


def _quality(report: Report) -> Table:
    packed, int8 = report.quality, report.int8
    rows: list[tuple[str, ...]] = []
    if isinstance(packed, LogitQuality) and isinstance(int8, LogitQuality):
        for label, name, form in (
            ("KL from BF16, nats a token", "kl", "{:.3g}"),
            ("top-1 agreement", "top1", "{:.2%}"),
            ("perplexity", "perplexity", "{:.4g}"),
            ("perplexity against BF16", "perplexity_ratio", "{:+.3%}"),
        ):
            rows.append((label, *_estimate(getattr(packed, name), form), *_estimate(getattr(int8, name), form)))
        rows.append(("perplexity of BF16", *_estimate(packed.reference_perplexity, "{:.4g}"), "", ""))
    elif isinstance(packed, EmbeddingQuality) and isinstance(int8, EmbeddingQuality):
        form = "{:.5f}"
        rows.append(("mean cosine with BF16", *_estimate(packed.cosine, form), *_estimate(int8.cosine, form)))
        rows.append(("least cosine of a prompt", form.format(packed.least), "", form.format(int8.least), ""))
    measured = f"{packed.prompts} prompts, {packed.tokens} tokens; " if packed else ""
    remark = (
        f"{measured}the columns headed 95 % are confidence intervals over prompts. INT8 is measured for comparison: it "
        "is MODEL with the same layers in eight-bit integers, as the scheme int8 packs them. Its steps are finer than "
        "e4m3's unless outliers stretch its scale. " + _advice(report)
    )
    return Table("Quality", ("", "packed", "95 %", "INT8", "95 %"), rows, (), ("",), remark)


def _advice(report: Report) -> str:
    """The scheme that is nearer to BF16, that of the folder or int8, and the speed of both."""
    own = "".join(name for name, _ in Counter(layer.spec for layer in report.layers).most_common(1))
    if report.quality is None or report.int8 is None or own == "int8":
        return ""
    distances = [q.kl if isinstance(q, LogitQuality) else q.cosine for q in (report.quality, report.int8)]
    (low, high), (int8_low, int8_high) = ((e.low, e.high) for e in distances)
    if low is None or high is None or int8_low is None or int8_high is None or (int8_low <= high and low <= int8_high):
        nearer = f"{own} and int8 do not differ beyond their intervals"
    else:
        is_int8 = (int8_low > high) != isinstance(report.quality, LogitQuality)  # a cosine is better where it is larger
        nearer = f"{'int8' if is_int8 else own} is nearer to BF16"
    speeds = speeds_note([own, "int8"])
    return f"Of the schemes, {nearer}" + (f"; speed: {speeds}." if speeds else ".")


def _estimate(estimate: Estimate, form: str) -> tuple[str, str]:
    if estimate.low is None or estimate.high is None:
        return form.format(estimate.value), "of one prompt"
    return form.format(estimate.value), f"{form.format(estimate.low)} to {form.format(estimate.high)}"


def _layers(report: Report) -> Table:
    columns = ("layer", "scheme", "shape", "weight dB", "output dB", "clipped", "headroom")
    rows = [
        (
            layer.name, layer.spec, " x ".join(map(str, layer.shape)), _number(layer.weight_sqnr, "{:.1f}"),
            _number(layer.output_sqnr, "{:.1f}"), _number(layer.clip_rate, "{:.2%}"), _number(layer.headroom, "{:.2f}"),
        )
        for layer in report.layers
    ]  # fmt: skip
    remark = (
        "SQNR in dB: of the weight against MODEL's, and of the output (without bias) against the BF16 layer's for the "
        "same inputs. Clipped and headroom are of stored input scales: the share of inputs beyond the range, and the "
        "range over the largest input."
    )
    return Table("Layers", columns, rows, remark=remark)


def _sizes(report: Report) -> Table:
    sizes = report.sizes
    if sizes is None:
        return Table("Size", (), [])
    rows = [
        (name, f"{size / 1e6:.2f}", f"{bf16 / 1e6:.2f}", f"{size / bf16:.3f}")
        for name, size, bf16 in (
            ("packed layers, with scales", sizes["packed"], sizes["packed_bf16"]),
            ("all tensors", sizes["whole"], sizes["whole_bf16"]),
        )
        if bf16
    ]
    return Table("Size", ("", "MB", "in BF16", "ratio"), rows, (), ("",))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else "no error" if value == math.inf else form.format(value)
