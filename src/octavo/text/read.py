"""Reading text from sources: files, folders, globs and data sets."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.text.dataset import read_dataset
from octavo.text.document import Chat, DataError, Document
from octavo.text.files import read_file
from octavo.text.report import ReadReport, Tally
from octavo.text.sources import DATASET, find_files


@dataclass(frozen=True, eq=False)
class Reading:
    """The documents of some sources, at least one document, and the report of reading them."""

    documents: tuple[Document, ...]
    report: ReadReport

    @property
    def texts(self) -> list[str]:
        return [document.text for document in self.documents]


def read_text(sources: Sequence[str], chat: Chat | None = None) -> Reading:
    """Read every document of `sources`: those of files first, in the order of their paths, then those of data sets.

    A source is one of

    - `stdlib`: the modules of Python's standard library.
    - a file. `.jsonl` and `.ndjson` hold one JSON object a line, with "text" or "prompt" (a string) or "messages" (a
      conversation: a list of {"role", "content"}); each line is a document. A structured file (`.json`, `.csv`,
      `.parquet` and the like) is an error. Every other file is one text in UTF-8 without NUL.
    - a folder: all files below it. Left out are hidden files, `__pycache__` and `site-packages`.
    - a glob; `**` crosses folders.
    - `hf:NAME_OR_FOLDER?config=...&split=train&column=text`: a Hugging Face data set, each row a document. Without
      `column`, the first of the columns text, prompt and messages is read.

    Where a folder, a glob or `stdlib` leads to a file that is not text, the file is skipped and counted in the report.
    Such a file is binary, not UTF-8, empty or structured, or is one that programs write for themselves (`.lock`,
    `.safetensors`, a tokenizer's `merges.txt` and the like). A row without text is skipped and counted as well. A file
    is read once, however many sources lead to it.

    Args:
        sources: at least one.
        chat: writes a conversation as text (`chat_of` gives the template of a tokenizer).

    Raises:
        TypeError: `sources` is a string.
        DataError: a source does not exist or leads to no text, a file that is named itself is not text, a row is
            malformed (the message names the file and the line), or `chat` is None and a row is a conversation.
        ImportError: an `hf:` source without the extra `hf`.

    Example::

        reading = read_text(["books/", "chats.jsonl"], chat_of(tokenizer))
        print(*reading.report.lines(), sep="\\n")
    """
    if isinstance(sources, str):
        raise TypeError(f"data is a list of sources, got the string {sources!r}: give [{sources!r}]")
    if not sources:
        raise DataError("data must name at least one source; got none")
    tally = Tally()
    documents: list[Document] = []
    for path, named in _files([source for source in sources if not source.startswith(DATASET)], tally):
        documents += read_file(path, named, chat, tally)
    for source in sources:
        if source.startswith(DATASET):
            documents += read_dataset(source, chat, tally)
    report = tally.report(len(documents))
    if not documents:
        raise DataError(f"data must hold some text; {', '.join(sources)} gave none: {report.lines()[0]}")
    return Reading(tuple(documents), report)


def _files(sources: Sequence[str], tally: Tally) -> list[tuple[Path, bool]]:
    """The files of all sources, each once, sorted, and whether a source names the file itself."""
    named: dict[Path, bool] = {}
    for source in sources:
        paths, by_name = find_files(source, tally)
        for path in paths:
            named[path.resolve()] = by_name or named.get(path.resolve(), False)
    return sorted(named.items())
