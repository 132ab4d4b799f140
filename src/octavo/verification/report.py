"""The report of `octavo verify`: a dictionary for JSON, and tables of text for the terminal and the HTML page."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self

from octavo.evaluation.metrics import EmbeddingQuality, Estimate, LogitQuality
from octavo.extras import installed
from octavo.verification.result import Report
from octavo.version import __version__


class Section(NamedTuple):
    """A table: its title, its columns, its rows of text, and a remark to print below it."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    remark: str = ""


@dataclass(frozen=True)
class Invocation:
    """The time (UTC, ISO 8601), the command and the package versions that a report was made with."""

    date: str
    command: str
    versions: Mapping[str, str]

    @classmethod
    def now(cls, command: str) -> Self:
        versions = {name: version for name in _PACKAGES if (version := installed(name))}
        return cls(datetime.now(UTC).isoformat(timespec="seconds"), command, {"octavo": __version__} | versions)


_PACKAGES = ("torch", "transformers", "compressed-tensors", "vllm")


def to_dict(report: Report, invocation: Invocation) -> dict[str, Any]:
    """The report for JSON. JSON has no inf and no NaN, so they become None."""
    fields: dict[str, Any] = {
        **asdict(invocation),
        "octavo_version": __version__,
        "model": report.architecture,
        "packed": str(report.packed),
        "against": str(report.against),
        "ok": report.ok,
        "findings": [asdict(finding) for finding in report.findings],
        "not_run": report.not_run or None,
        "remarks": report.remarks,
        "data": None if report.data is None else report.data.to_dict(),
        "readers": [asdict(reader) for reader in report.readers],
        "quality": None if report.quality is None else report.quality.to_dict(),
        "int8": None if report.int8 is None else report.int8.to_dict(),
        "layers": [asdict(layer) for layer in report.layers],
        "bytes": None if report.sizes is None else asdict(report.sizes),
    }
    finite: dict[str, Any] = _finite(fields)
    return finite


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def sections(report: Report) -> Iterator[Section]:
    """The tables of a report that have rows, without empty columns. Findings are not in a table."""
    for section in (_readers(report), _quality(report), _layers(report), _sizes(report)):
        if section.rows:
            yield without_blanks(section)


def without_blanks(section: Section) -> Section:
    """The section without the columns that are empty in every row."""
    used = [i for i in range(len(section.columns)) if any(row[i] for row in section.rows)]
    rows = [tuple(row[i] for i in used) for row in section.rows]
    return section._replace(columns=tuple(section.columns[i] for i in used), rows=rows)


def verdict(report: Report) -> str:
    if report.ok:
        agreeing = [reader.name for reader in report.readers if reader.outcome == "agrees"]
        readers = f"{', '.join(agreeing)} {'agrees' if len(agreeing) == 1 else 'agree'} with them"
        return f"the bytes are right; {readers if agreeing else 'no reader was tried'}"
    count = len(report.findings)
    return f"{count} {'thing is' if count == 1 else 'things are'} wrong" + (
        f"; {report.not_run}" if report.not_run else ""
    )


def _readers(report: Report) -> Section:
    rows = [
        (
            f"{reader.name} {reader.version}".strip(), reader.outcome, _percent(reader.distance),
            _percent(reader.tolerance), reader.note,
        )
        for reader in report.readers
    ]  # fmt: skip
    remark = (
        "Distance between a reader's outputs and those of the bytes in float32, relative to their size. The allowed "
        "distance follows from how far rounding alone moves the outputs on the same prompts."
    )
    return Section("Readers", ("reader", "outcome", "distance", "allowed", ""), rows, remark)


def _quality(report: Report) -> Section:
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
        "e4m3's unless outliers stretch its scale."
    )
    return Section("Quality", ("", "packed", "95 %", "INT8", "95 %"), rows, remark)


def _estimate(estimate: Estimate, form: str) -> tuple[str, str]:
    if estimate.low is None or estimate.high is None:
        return form.format(estimate.value), "of one prompt"
    return form.format(estimate.value), f"{form.format(estimate.low)} to {form.format(estimate.high)}"


def _layers(report: Report) -> Section:
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
    return Section("Layers", columns, rows, remark)


def _sizes(report: Report) -> Section:
    sizes = report.sizes
    if sizes is None:
        return Section("Size", (), [])
    rows = [
        (name, f"{size / 1e6:.2f}", f"{bf16 / 1e6:.2f}", f"{size / bf16:.3f}")
        for name, size, bf16 in (
            ("packed layers, with scales", sizes.packed, sizes.packed_bf16),
            ("all tensors", sizes.whole, sizes.whole_bf16),
        )
        if bf16
    ]
    return Section("Size", ("", "MB", "in BF16", "ratio"), rows)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.3%}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else "no error" if value == math.inf else form.format(value)
