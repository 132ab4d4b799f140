"""Read text from files, folders, globs and data sets, and report the files that were read and skipped."""

import glob
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl

from rich.filesize import decimal

from octavo.data.chat import ChatTemplate
from octavo.util import import_extra, plural, reading

ROW_FIELDS = ("text", "prompt", "messages")
Row = tuple[str, str, Any]  # where it stands, the field that is read, and its value

Chat = Callable[[Any], str]  # a chat template: from messages, [{"role": ..., "content": ...}, ...], to text


class DataError(ValueError):
    """Data that is missing, malformed or too short; the message names the source, and the line where there is one."""


@dataclass(frozen=True)
class Document:
    """A piece of text that is read as a whole. That of a chat already holds the special tokens of the model."""

    text: str
    kind: Literal["text", "row", "chat"]  # a whole file, a row of a data set, a conversation


def chat_of(tokenizer: Any) -> ChatTemplate | None:
    """The chat template of a transformers tokenizer, as a function; None if the tokenizer has no template."""
    return ChatTemplate(tokenizer) if getattr(tokenizer, "chat_template", None) else None


_EXAMPLES = 3
_SUBSTANTIAL = 0.1  # share of the bytes that must not be skipped without a warning


@dataclass
class Skipped:
    """The files or rows that were skipped for one reason: their number, their bytes, and the first names."""

    count: int = 0
    bytes: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class ReadReport:
    """The files and rows that a reader read and skipped."""

    files: list[Path] = field(default_factory=list)  # that gave at least one document
    datasets: int = 0  # of Hugging Face
    documents: int = 0  # texts, rows and conversations
    size: int = 0  # bytes that were read, in UTF-8
    skipped: dict[str, Skipped] = field(default_factory=dict)  # the files and rows without text, by reason
    fields: set[str] = field(default_factory=set)  # of rows that were not read

    def skip(self, where: str, reason: str, size: int) -> None:
        """Count a file or row; `where` is a path, a row of a file or a row of a data set."""
        skipped = self.skipped.setdefault(reason, Skipped())
        skipped.count += 1
        skipped.bytes += size
        name = Path(where).name
        if len(skipped.examples) < _EXAMPLES and name not in skipped.examples:
            skipped.examples.append(name)

    def lines(self) -> list[str]:
        """One line on the files read and skipped, and a second one, a warning, where many bytes were skipped."""
        counts = ((len(self.files), "file"), (self.datasets, "data set"))
        sources = " and ".join(plural(count, noun) for count, noun in counts if count) or "0 files"
        if self.datasets or self.documents != len(self.files):
            sources = f"{plural(self.documents, 'document')} from {sources}"
        said = f"read {sources} ({decimal(self.size)})"
        if self.skipped:
            reasons = []
            for reason, each in self.skipped.items():
                names = ", ".join([*each.examples, *["..."] * (each.count > len(each.examples))])
                reasons.append(f"{each.count} {reason} ({names})")
            said += f"; skipped {sum(each.count for each in self.skipped.values())}: {', '.join(reasons)}"
        if self.fields:
            more = ", ..." * (len(self.fields) > _EXAMPLES)
            names = ", ".join(sorted(self.fields)[:_EXAMPLES])
            said += f"; of the rows, these fields are not read: {names}{more}"
        found = [said]
        lost = sum(skipped.bytes for skipped in self.skipped.values())
        share = lost / max(lost + self.size, 1)
        if share >= _SUBSTANTIAL:
            advice = ": convert the files that are not UTF-8" if "not UTF-8" in self.skipped else ""
            found.append(f"warning: {share:.0%} of the bytes were skipped ({decimal(lost)}){advice}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """The numbers of the report and the names of examples, without folders."""
        return {
            "files": len(self.files),
            "datasets": self.datasets,
            "documents": self.documents,
            "bytes": self.size,
            "skipped": {reason: asdict(each) for reason, each in self.skipped.items()},
            "fields_not_read": sorted(self.fields),
        }


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
    report = ReadReport()
    documents: list[Document] = []
    named: dict[Path, bool] = {}  # each file once: does a source name the file itself?
    for source in sources:
        if not source.startswith(DATASET):
            paths, by_name = _find_files(source, report)
            named |= {path.resolve(): by_name or named.get(path.resolve(), False) for path in paths}
    for path, by_name in sorted(named.items()):
        documents += _read_file(path, by_name, chat, report)
    for source in sources:
        if source.startswith(DATASET):
            documents += _read_dataset(source, chat, report)
    report.documents = len(documents)
    if not documents:
        raise DataError(f"data must hold some text; {', '.join(sources)} gave none: {report.lines()[0]}")
    return Reading(tuple(documents), report)


# ---- Finding the files of a source: Python's standard library, a file, a folder or a glob.


DATASET = "hf:"
STDLIB = "stdlib"
LEFT_OUT_FOLDERS = ("__pycache__", "site-packages")


def absolute_source(source: str) -> str:
    """`source` in a form that names the same data from every working directory."""
    if source.startswith(DATASET):
        name, mark, options = source.removeprefix(DATASET).partition("?")
        return DATASET + (absolute_source(name) if os.path.isdir(name) else name) + mark + options
    path = os.path.expanduser(source)
    if source == STDLIB or os.path.isabs(path):
        return path
    # A working directory can have the characters of a glob in its name.
    is_glob = glob.has_magic(path) and not os.path.exists(path)
    return os.path.join(glob.escape(os.getcwd()) if is_glob else os.getcwd(), path)


def _find_files(source: str, report: ReadReport) -> tuple[list[Path], bool]:
    """The files of a source other than a data set, and True if the source names the file itself. `report` counts the
    entries of a folder that are not readable files, such as links to folders."""
    if source == STDLIB:
        folder = Path(sysconfig.get_path("stdlib"))
        return [path for path in _walk(folder, report) if path.suffix == ".py"], False
    path = os.path.expanduser(source)
    if os.path.isfile(path):
        return [Path(path)], True
    if path and os.path.isdir(path):
        files = list(_walk(Path(path), report))
        if not files:
            raise DataError(f"the folder {source} must hold files to read; it has none (hidden files do not count)")
        return files, False
    if not glob.has_magic(path):
        raise DataError(
            f"data source {source!r} must be {STDLIB}, a file, a folder, a glob or {DATASET}DATASET; there is no such "
            f"file or folder{'' if os.path.isabs(path) else f' in {Path.cwd()}'}: give its place by --data"
        )
    files = [Path(match) for match in glob.glob(path, recursive=True) if os.path.isfile(match)]
    if not files:
        raise DataError(f"the glob {source} must match files; it matches none from {Path.cwd()}")
    return files, False


def _walk(folder: Path, report: ReadReport) -> Iterator[Path]:
    """Every file below `folder`, except hidden files and files in folders that are hidden or in LEFT_OUT_FOLDERS."""
    for root, folders, names in os.walk(folder, onerror=lambda e: report.skip(str(e.filename), "unreadable", 0)):
        folders[:] = sorted(name for name in folders if name not in LEFT_OUT_FOLDERS and name[0] != ".")
        for name in folders:
            if os.path.islink(os.path.join(root, name)):
                report.skip(os.path.join(root, name), "a link to a folder", 0)
        for path in (Path(root, name) for name in sorted(names) if name[0] != "."):
            if path.is_file():
                yield path
            else:
                report.skip(str(path), "not a regular file", 0)


# ---- Reading a file as documents: which files are text, and how a file of rows is parsed.


ROWS = (".jsonl", ".ndjson")
# Tables and trees of values, which no tokenizer should see as they are spelled.
STRUCTURED = (".json", ".csv", ".tsv", ".parquet", ".arrow", ".ipynb")
# Files that programs write for themselves. Some hold characters, but nobody means them as training text.
GENERATED = (".lock", ".map", ".svg", ".jinja", ".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".model")
TOKENIZER_FILES = ("merges.txt", "vocab.txt")

_HEAD = 1 << 16  # bytes in which a binary file has a NUL, so that no file of weights is read whole


def _read_file(path: Path, named: bool, chat: Chat | None, report: ReadReport) -> list[Document]:
    """The documents of one file, which is an error or skipped if it is not text."""
    size = path.stat().st_size
    rows = path.suffix.lower() in ROWS
    text, reason, message = _text_of(path, named)
    if message and (named or (rows and reason != "unreadable")):
        raise DataError(message)
    if reason:
        report.skip(str(path), reason, size)
        return []
    documents = _documents(_rows(path, text, report), chat, report) if rows else [Document(text, "text")]
    if documents:
        report.files.append(path)
        report.size += size
    return documents


def _text_of(path: Path, named: bool) -> tuple[str, str, str]:
    """The text of a file in UTF-8 without NUL. Of another file why it is skipped, and the message where it is an error,
    as for a file that is named; "" where it is none."""
    suffix = path.suffix.lower()
    if suffix in STRUCTURED or (not named and (suffix in GENERATED or path.name in TOKENIZER_FILES)):
        remedy = f"give {ROWS[0]} with {' or '.join(ROW_FIELDS)}, or a data set as hf:FOLDER"
        said = f"which is not read as text: {remedy}; to read its characters, copy it to a .txt file"
        return "", "not text by name", f"{path} holds structured data ({suffix}), {said}"
    try:
        with path.open("rb") as file:
            content = file.read(_HEAD)
            if 0 not in content:
                content += file.read()
    except OSError as error:
        return "", "unreadable", f"{path} cannot be read: {error.strerror}"
    text, nul = "", content.find(0)
    try:
        text, bad = content.decode("utf-8"), nul
    except UnicodeDecodeError as error:
        bad = error.start if nul < 0 else min(nul, error.start)
    if bad >= 0:
        reason = "not UTF-8" if nul < 0 or content[:2] in (b"\xff\xfe", b"\xfe\xff") else "binary"  # marks of UTF-16
        return "", reason, f"{path} must be text (UTF-8 without NUL); byte {bad} is not: convert it first"
    return text, "" if text.strip() else "empty", ""


# ---- Rows: of a file with one JSON object a line, or of a Hugging Face data set (extra `hf`).


def _documents(rows: Iterable[Row], chat: Chat | None, report: ReadReport) -> list[Document]:
    found = []
    for where, name, value in rows:
        if name == "messages" or isinstance(value, list):
            document = Document(_write_conversation(value, name, where, chat), "chat")
        elif isinstance(value, str):
            document = Document(value, "row")
        else:
            raise DataError(f"{where}: {name} must be a string, got {type(value).__name__}")
        try:
            document.text.encode()
        except UnicodeEncodeError as error:
            half = f"character {error.start} is half a surrogate pair"
            raise DataError(f"{where}: {name} must be text; {half}") from error
        if document.text.strip():
            found.append(document)
        else:
            report.skip(where, "empty", 0)
    return found


def _write_conversation(messages: Any, field: str, where: str, chat: Chat | None) -> str:
    if not isinstance(messages, list) or not all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages
    ):
        raise DataError(f'{where}: {field} must be a list of objects with "role" and "content"')
    if chat is None:
        raise DataError(
            f"{where}: a conversation needs the tokenizer's chat template, and this tokenizer has none: use a Hugging "
            "Face model that was trained to chat, or give rows with text"
        )
    if not messages:
        return ""
    try:
        return chat(messages)
    except Exception as error:  # A chat template is a program of the model's author, and can raise any exception.
        raise DataError(f"{where}: the chat template does not take these messages ({error})") from error


def _rows(path: Path, text: str, report: ReadReport) -> Iterator[Row]:
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        with reading(where, "valid JSON", DataError):
            row = json.loads(line)
        name = next((name for name in ROW_FIELDS if isinstance(row, dict) and name in row), None)
        if name is None:
            got = f"the keys {', '.join(row)}" if isinstance(row, dict) else type(row).__name__
            raise DataError(f"{where}: a row must be an object with {' or '.join(ROW_FIELDS)}, got {got}")
        report.fields |= row.keys() - {name}
        yield where, name, row[name]


def _read_dataset(source: str, chat: Chat | None, report: ReadReport) -> list[Document]:
    """The documents of `hf:NAME_OR_FOLDER?config=...&split=...&column=...`, one a row."""
    name, _, query = source.removeprefix(DATASET).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := options.keys() - {"config", "split", "column"}:
        raise DataError(f"{source} takes the options config, split and column; got {', '.join(sorted(unknown))}")
    if not name:
        raise DataError(f"{source} must name a data set of the hub, or a folder: hf:NAME")
    with reading(source, "a data set that the package datasets reads", DataError):
        dataset = _open(source, name, options)
        columns = dataset.column_names
        wanted = (options["column"],) if "column" in options else ROW_FIELDS
        if (column := next((name for name in wanted if name in columns), None)) is None:
            raise DataError(
                f"{source} must have the column {' or '.join(wanted)}; it has {', '.join(columns)}: add ?column=NAME"
            )
        report.datasets += 1
        report.fields |= set(columns) - {column}
        given = ((column, value) if value is not None else ("text", "") for value in dataset[column])
        rows = ((f"{source}, row {index}", *each) for index, each in enumerate(given))
        documents = _documents(rows, chat, report)
    report.size += sum(len(document.text.encode()) for document in documents)
    return documents


def _open(source: str, name: str, options: dict[str, str]) -> Any:
    datasets = import_extra("datasets", "hf", f"{source} is read through the package datasets")
    saved = any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json"))
    split = options.get("split", "train")
    if not saved:
        return datasets.load_dataset(name, options.get("config"), split=split)
    opened = datasets.load_from_disk(name)
    if not isinstance(opened, datasets.DatasetDict):
        if "split" in options:
            raise DataError(f"{source} must not ask for a split: the saved folder holds a single one")
        return opened
    if split not in opened:
        raise DataError(f"{source} must have the split {split}; it has {', '.join(opened)}: add ?split=NAME")
    return opened[split]
