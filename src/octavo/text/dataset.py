"""Reading a Hugging Face data set, on the Hub or in a folder, as documents (extra `hf`)."""

from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from octavo.extras import import_extra
from octavo.text.document import ROW_FIELDS, Chat, DataError, Document, document_of_value
from octavo.text.report import Tally
from octavo.text.sources import DATASET

_OPTIONS = ("config", "split", "column")


def read_dataset(source: str, chat: Chat | None, tally: Tally) -> list[Document]:
    """The documents of `hf:NAME_OR_FOLDER?config=...&split=...&column=...`, one a row.

    Raises:
        DataError: the data set, the split or the column does not exist, or a row holds something else.
        ImportError: datasets is not installed.
    """
    name, _, query = source.removeprefix(DATASET).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := options.keys() - set(_OPTIONS):
        raise DataError(f"{source} takes the options config, split and column; got {', '.join(sorted(unknown))}")
    dataset = _open(source, name, options)
    column = _column(source, dataset.column_names, options.get("column"))
    tally.datasets += 1
    tally.fields.update(set(dataset.column_names) - {column})
    documents = []
    for index, value in enumerate(dataset[column]):
        where = f"{source}, row {index}"
        document = None if value is None else document_of_value(value, column, where, chat)
        if document is None:
            tally.skip(where, "empty", 0)
        else:
            tally.size += len(document.text.encode())
            documents.append(document)
    return documents


def _column(source: str, columns: list[str], asked: str | None) -> str:
    wanted = ROW_FIELDS if asked is None else (asked,)
    column = next((name for name in wanted if name in columns), None)
    if column is None:
        raise DataError(
            f"{source} must have the column {' or '.join(wanted)}; it has {', '.join(columns)}: add ?column=NAME"
        )
    return column


def _open(source: str, name: str, options: dict[str, str]) -> Any:
    datasets = import_extra("datasets", "hf", f"{source} is read through the package datasets")
    saved = any((Path(name) / file).is_file() for file in ("dataset_dict.json", "state.json"))
    split = options.get("split", "train")
    try:
        if not saved:
            return datasets.load_dataset(name, options.get("config"), split=split)
        opened = datasets.load_from_disk(name)
    except (OSError, ValueError) as error:
        raise DataError(f"{source} cannot be opened as a Hugging Face dataset: {error}") from error
    if not isinstance(opened, datasets.DatasetDict):
        if "split" in options:
            raise DataError(f"{source} must not ask for a split: the saved folder holds a single one")
        return opened
    if split not in opened:
        raise DataError(f"{source} must have the split {split}; it has {', '.join(opened)}: add ?split=NAME")
    return opened[split]
