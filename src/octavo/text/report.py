"""The report of reading sources: lines to print, and a dictionary for JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.words import plural

_EXAMPLES = 3
_SUBSTANTIAL = 0.1  # share of the bytes that must not be skipped without a warning


@dataclass
class Skipped:
    """The files or rows that were skipped for one reason: their number, their bytes, and the first names."""

    count: int = 0
    size: int = 0
    examples: list[str] = field(default_factory=list)

    def names(self) -> str:
        """The example names, followed by ... if there are more."""
        return ", ".join([*self.examples, *["..."] * (self.count > len(self.examples))])


@dataclass(frozen=True)
class ReadReport:
    """The files and rows that a reader read and skipped.

    Attributes:
        files: the files that gave at least one document.
        datasets: the number of Hugging Face data sets.
        documents: the number of texts, rows and conversations.
        size: bytes that were read, in UTF-8.
        skipped: the files and rows without text, by reason.
        fields: the fields of rows that were not read, sorted.
    """

    files: tuple[Path, ...]
    datasets: int
    documents: int
    size: int
    skipped: Mapping[str, Skipped]
    fields: tuple[str, ...]

    def lines(self) -> list[str]:
        """One line on the files read and skipped, and a second one, a warning, where many bytes were skipped."""
        found = [f"{self._read()}{self._skipped()}{self._fields()}"]
        lost = sum(skipped.size for skipped in self.skipped.values())
        share = lost / max(lost + self.size, 1)
        if share >= _SUBSTANTIAL:
            advice = ": convert the files that are not UTF-8" if "not UTF-8" in self.skipped else ""
            found.append(f"warning: {share:.0%} of the bytes were skipped ({show_size(lost)}){advice}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """The numbers of the report and the names of examples, without folders."""
        return {
            "files": len(self.files),
            "datasets": self.datasets,
            "documents": self.documents,
            "bytes": self.size,
            "skipped": {
                reason: {"count": skipped.count, "bytes": skipped.size, "examples": skipped.examples}
                for reason, skipped in self.skipped.items()
            },
            "fields_not_read": list(self.fields),
        }

    def _read(self) -> str:
        files, datasets = plural(len(self.files), "file"), plural(self.datasets, "data set")
        named = [text for text, count in ((files, len(self.files)), (datasets, self.datasets)) if count]
        sources = " and ".join(named) or files
        if self.datasets or self.documents != len(self.files):
            sources = f"{plural(self.documents, 'document')} from {sources}"
        return f"read {sources} ({show_size(self.size)})"

    def _skipped(self) -> str:
        if not self.skipped:
            return ""
        reasons = [f"{skipped.count} {reason} ({skipped.names()})" for reason, skipped in self.skipped.items()]
        count = sum(skipped.count for skipped in self.skipped.values())
        return f"; skipped {count}: {', '.join(reasons)}"

    def _fields(self) -> str:
        if not self.fields:
            return ""
        more = ", ..." * (len(self.fields) > _EXAMPLES)
        return f"; of the rows, these fields are not read: {', '.join(self.fields[:_EXAMPLES])}{more}"


class Tally:
    """Counts files and rows while they are read, for the report."""

    def __init__(self) -> None:
        self.files: list[Path] = []
        self.datasets = 0
        self.size = 0
        self.skipped: dict[str, Skipped] = {}
        self.fields: set[str] = set()

    def skip(self, where: str, reason: str, size: int) -> None:
        """Count a file or row; `where` is a path, a row of a file or a row of a data set."""
        skipped = self.skipped.setdefault(reason, Skipped())
        skipped.count += 1
        skipped.size += size
        name = Path(where).name
        if len(skipped.examples) < _EXAMPLES and name not in skipped.examples:
            skipped.examples.append(name)

    def report(self, documents: int) -> ReadReport:
        return ReadReport(
            tuple(self.files), self.datasets, documents, self.size, self.skipped, tuple(sorted(self.fields))
        )


def show_size(size: int) -> str:
    """A number of bytes with its unit: 512 bytes, 3.4 kB, 3.4 MB, 3.4 GB."""
    for power, unit in ((9, "GB"), (6, "MB"), (3, "kB")):
        if size >= 10**power:
            return f"{size / 10**power:.1f} {unit}"
    return plural(size, "byte")
