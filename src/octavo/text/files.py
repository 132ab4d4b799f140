"""Reading a file as documents: which files are text, and how a file of rows is parsed."""

import json
from pathlib import Path

from octavo.text.document import ROW_FIELDS, Chat, DataError, Document, document_of_value
from octavo.text.report import Tally

ROWS = (".jsonl", ".ndjson")
# Tables and trees of values, which no tokenizer should see as they are spelled.
STRUCTURED = (".json", ".csv", ".tsv", ".parquet", ".arrow", ".ipynb")
# Files that programs write for themselves. Some hold characters, but nobody means them as training text.
GENERATED = (".lock", ".map", ".svg", ".jinja", ".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".model")
TOKENIZER_FILES = ("merges.txt", "vocab.txt")

_HEAD = 1 << 16  # bytes that show whether a file is binary, so that no file of weights is read whole


def read_file(path: Path, named: bool, chat: Chat | None, tally: Tally) -> list[Document]:
    """The documents of one file. `tally` counts the files and rows that hold no text.

    Args:
        named: a source names the file itself. Such a file must be text; a file that a folder or a glob leads to is
            skipped if it is not.

    Raises:
        DataError: a file that is named itself is not text, or a line of a file of rows is malformed.
    """
    suffix = path.suffix.lower()
    if named and suffix in STRUCTURED:
        raise DataError(
            f"{path} holds structured data ({suffix}), which is not read as text: give {ROWS[0]} with "
            f"{' or '.join(ROW_FIELDS)}, or a data set as hf:FOLDER; to read its characters, copy it to a .txt file"
        )
    size = path.stat().st_size
    if not named and (suffix in STRUCTURED + GENERATED or path.name in TOKENIZER_FILES):
        tally.skip(str(path), "not text by name", size)
        return []
    try:
        text = _decode(path)
    except _NotTextError as error:
        if named or suffix in ROWS:
            raise DataError(f"{path} must be text (UTF-8 without NUL); byte {error.byte} is not") from None
        tally.skip(str(path), error.reason, size)
        return []
    except OSError as error:
        if named:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        tally.skip(str(path), "unreadable", size)
        return []
    if not text.strip():
        tally.skip(str(path), "empty", size)
        return []
    documents = _rows(path, text, chat, tally) if suffix in ROWS else [Document(text, "text")]
    if documents:
        tally.files.append(path)
        tally.size += size
    return documents


class _NotTextError(Exception):
    """Bytes that are not text, and the offset of the first of them."""

    def __init__(self, reason: str, byte: int) -> None:
        super().__init__(reason, byte)
        self.reason, self.byte = reason, byte


def _decode(path: Path) -> str:
    """The text of a file in UTF-8 without NUL."""
    with path.open("rb") as file:
        content = file.read(_HEAD)
        if 0 not in content:
            content += file.read()
    nul = content.find(0)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = error.start if nul < 0 else min(nul, error.start)
        raise _NotTextError("not UTF-8" if nul < 0 else "binary", byte) from error
    if nul >= 0:
        raise _NotTextError("binary", nul)
    return text


def _rows(path: Path, text: str, chat: Chat | None, tally: Tally) -> list[Document]:
    """The documents of a file that holds one JSON object a line."""
    documents = []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not valid JSON ({error})") from error
        field = next((name for name in ROW_FIELDS if isinstance(row, dict) and name in row), None)
        if field is None:
            got = f"the keys {', '.join(row)}" if isinstance(row, dict) else type(row).__name__
            raise DataError(f"{where}: a row must be an object with {' or '.join(ROW_FIELDS)}, got {got}")
        tally.fields.update(row.keys() - {field})
        document = document_of_value(row[field], field, where, chat)
        if document is None:
            tally.skip(where, "empty", 0)
        else:
            documents.append(document)
    return documents
