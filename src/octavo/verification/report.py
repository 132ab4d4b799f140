"""What `octavo verify` found, as a dictionary for JSON and as rows of text, which terminal and page both show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, NamedTuple

from octavo.evaluation.metrics import EmbeddingQuality, Estimate, LogitQuality
from octavo.verification.result import Report
from octavo.version import __version__


class Section(NamedTuple):
    """A table: its title, the names of its columns, and its rows; and what is to be said below it."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    remark: str = ""


@dataclass(frozen=True)
class Run:
    """When a report was made (UTC, ISO 8601), by which command, and with which versions of packages."""

    date: str
    command: str
    versions: Mapping[str, str]

    @classmethod
    def now(cls, command: str) -> Run:
        """Of this moment and this environment."""
        installed = {name: version for name in _PACKAGES if (version := _version(name))}
        return cls(datetime.now(UTC).isoformat(timespec="seconds"), command, {"octavo": __version__} | installed)


_PACKAGES = ("torch", "transformers", "compressed-tensors", "vllm")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def to_dict(report: Report, run: Run) -> dict[str, Any]:
    """For JSON, which has no inf and no NaN: they become None."""
    fields: dict[str, Any] = {
        **asdict(run),
        "octavo_version": __version__,
        "model": report.architecture,
        "packed": str(report.packed),
        "against": str(report.against),
        "ok": report.ok,
        "findings": [asdict(finding) for finding in report.findings],
        "not_run": report.not_run or None,
        "remarks": report.remarks,
        "data": None if report.data is None else report.data.to_dict(),
        "consumers": [asdict(consumer) for consumer in report.consumers],
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
    """The tables of a report, those without rows left out. The findings stand beside the verdict, in no table."""
    for section in (_consumers(report), _quality(report), _layers(report), _sizes(report)):
        if section.rows:
            yield without_blanks(section)


def without_blanks(section: Section) -> Section:
    """Without the columns in which no row has anything."""
    kept = [at for at in range(len(section.columns)) if any(row[at] for row in section.rows)]
    rows = [tuple(row[at] for at in kept) for row in section.rows]
    return section._replace(columns=tuple(section.columns[at] for at in kept), rows=rows)


def verdict(report: Report) -> str:
    """One line."""
    if report.ok:
        agreeing = [consumer.name for consumer in report.consumers if consumer.outcome == "agrees"]
        readers = f"{', '.join(agreeing)} {'agrees' if len(agreeing) == 1 else 'agree'} with them"
        return f"the bytes are right; {readers if agreeing else 'no reader was tried'}"
    count = len(report.findings)
    return f"{count} {'thing is' if count == 1 else 'things are'} wrong" + (
        f"; {report.not_run}" if report.not_run else ""
    )


def _consumers(report: Report) -> Section:
    rows = [
        (
            f"{consumer.name} {consumer.version}".strip(), consumer.outcome, _percent(consumer.distance),
            _percent(consumer.tolerance), consumer.note,
        )
        for consumer in report.consumers
    ]  # fmt: skip
    remark = (
        "Distance of outputs from those of the bytes in float32, as a part of their size; what is allowed follows from "
        "how far rounding alone moves them on the same prompts."
    )
    return Section("Readers", ("reader", "outcome", "distance", "allowed", ""), rows, remark)


def _quality(report: Report) -> Section:
    title, columns = "Quality", ("", "packed", "95 %", "INT8", "95 %")
    mine, base = report.quality, report.int8
    rows: list[tuple[str, ...]] = []
    if isinstance(mine, LogitQuality) and isinstance(base, LogitQuality):
        for label, name, form in (
            ("KL from BF16, nats a token", "kl", "{:.3g}"),
            ("top-1 agreement", "top1", "{:.2%}"),
            ("perplexity", "perplexity", "{:.4g}"),
            ("perplexity against BF16", "perplexity_ratio", "{:+.3%}"),
        ):
            rows.append((label, *_estimate(getattr(mine, name), form), *_estimate(getattr(base, name), form)))
        rows.append(("perplexity of BF16", *_estimate(mine.reference_perplexity, "{:.4g}"), "", ""))
    elif isinstance(mine, EmbeddingQuality) and isinstance(base, EmbeddingQuality):
        form = "{:.5f}"
        rows.append(("cosine with BF16", *_estimate(mine.cosine, form), *_estimate(base.cosine, form)))
        rows.append(("the least of a prompt", form.format(mine.least), "", form.format(base.least), ""))
    measured = f"{mine.prompts} prompts, {mine.tokens} tokens; " if mine else ""
    remark = (
        f"{measured}intervals over prompts. INT8 is a yardstick and not in the folder: MODEL with the same layers in "
        "eight-bit integers, whose steps are finer than e4m3's where no outlier stretches the scale."
    )
    return Section(title, columns, rows, remark)


def _estimate(estimate: Estimate, form: str) -> tuple[str, str]:
    if estimate.low is None or estimate.high is None:
        return form.format(estimate.value), "of one prompt"
    return form.format(estimate.value), f"{form.format(estimate.low)} to {form.format(estimate.high)}"


def _layers(report: Report) -> Section:
    columns = ("layer", "packed by", "shape", "weight dB", "output dB", "clipped", "headroom")
    rows = [
        (
            layer.name, layer.words, " x ".join(map(str, layer.shape)), _number(layer.weight_sqnr, "{:.1f}"),
            _number(layer.output_sqnr, "{:.1f}"), _number(layer.clip_rate, "{:.2%}"), _number(layer.headroom, "{:.2f}"),
        )
        for layer in report.layers
    ]  # fmt: skip
    remark = (
        "SQNR in dB: the weight against MODEL's, the output against the BF16 layer's on the same inputs (without "
        "bias). Clipped and headroom (range over the largest input seen): of stored input scales."
    )
    return Section("Layers", columns, rows, remark)


def _sizes(report: Report) -> Section:
    sizes = report.sizes
    if sizes is None:
        return Section("Size", (), [])
    rows = [
        (name, f"{now / 1e6:.2f}", f"{before / 1e6:.2f}", f"{now / before:.3f}")
        for name, now, before in (
            ("packed layers, with scales", sizes.packed, sizes.packed_bf16),
            ("all tensors", sizes.whole, sizes.whole_bf16),
        )
        if before
    ]
    return Section("Size", ("", "MB", "in BF16", "ratio"), rows)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.3%}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else "no error" if value == math.inf else form.format(value)
