"""Text to batches of token ids, such that position in the data is one integer.

Documents are put in the order of a hash of their content: as good as a shuffle, the same on every machine, whatever
the files are called. They are tokenized and laid end to end; the last share is held out for validation. A
sequence is `context` consecutive tokens, and its targets are those one further on; an epoch visits each sequence once,
in a permutation drawn from a counter-based generator keyed by (seed, epoch) (Philox: Salmon et al., SC 2011,
"Parallel random numbers: as easy as 1, 2, 3"). Hence batch `i` depends on nothing but `i`: a resumed run, or one with
other ranks, needs no saved state.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import numpy.typing as npt
import torch

from octavo.artifact.text import decode, files_below
from octavo.extras import import_extra
from octavo.models.tokenizer import Tokenizer

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


NOT_TEXT = ("__pycache__", "site-packages")  # folders


class DataError(ValueError):
    """Text that is missing, not text, or too short; the message names the source."""


class Texts(list[str]):
    """Documents, none of them empty, with the `files` they came from and how many (binary or empty) were `skipped`."""

    def __init__(self, texts: Iterable[str] = (), files: Iterable[Path] = (), skipped: int = 0) -> None:
        super().__init__(texts)
        self.files = tuple(files)
        self.skipped = skipped


# --- Sources ---------------------------------------------------------------------------------------------------


def find_text(sources: Sequence[str]) -> list[Path]:
    """The text files that `sources` (see `load_texts`; none of them `hf:`) stand for, sorted, each once."""
    return list(_read_files(sources).files)


def load_texts(sources: Sequence[str]) -> Texts:
    """Read every document of `sources`.

    A source is `stdlib` (the modules of Python's standard library), a file, a folder (all below it but hidden files,
    `__pycache__` and `site-packages`), a glob (`**` crosses folders), or a Hugging Face dataset,
    `hf:NAME_OR_FOLDER?config=...&split=train&column=text`. Files must be UTF-8 without NUL bytes: another one is an
    error where it is named itself, and is skipped and counted where a folder, a glob or `stdlib` leads to it.

    Raises:
        DataError: a source does not exist, matches no file, is named and not text, or all of them hold no text.
        ImportError: an `hf:` source without the extra `hf`.
    """
    if not sources:
        raise DataError("data must name at least one source; got none")
    texts = _read_files([source for source in sources if not source.startswith("hf:")])
    for source in sources:
        if source.startswith("hf:"):
            rows = _read_dataset(source)
            documents = [row for row in rows if row]
            texts.extend(documents)
            texts.skipped += len(rows) - len(documents)
    if not texts:
        found = f"{texts.skipped} documents, all of them empty or binary" if texts.skipped else "nothing"
        raise DataError(f"data must hold some text; {', '.join(sources)} gave {found}")
    return texts


def _read_files(sources: Sequence[str]) -> Texts:
    named: dict[Path, bool] = {}  # whether a source names the file itself
    for source in sources:
        paths, by_name = _expand(source)
        for path in paths:
            named[path.resolve()] = by_name or named.get(path.resolve(), False)
    texts, files = [], []
    for path in sorted(named):
        text = decode(path.read_bytes())
        if isinstance(text, int) and named[path]:
            raise DataError(f"{path} must be text (UTF-8 without NUL); byte {text} is not")
        if isinstance(text, str) and text:
            texts.append(text)
            files.append(path)
    return Texts(texts, files, skipped=len(named) - len(files))


def _expand(source: str) -> tuple[list[Path], bool]:
    """The files of one source, and whether it names a file itself."""
    if source == "stdlib":
        files = [
            path for path in files_below(Path(sysconfig.get_path("stdlib")), leave_out=NOT_TEXT) if path.suffix == ".py"
        ]
        return files, False
    path = Path(source).expanduser()
    if path.is_file():
        return [path], True
    if path.is_dir():
        files = list(files_below(path, leave_out=NOT_TEXT))
        if not files:
            raise DataError(f"the folder {source} must hold files; it has none (hidden ones do not count)")
        return files, False
    if not glob.has_magic(source):
        raise DataError(f"data source {source} must be stdlib, a file, a folder, a glob or hf:DATASET; no such file")
    files = [Path(match) for match in glob.glob(str(path), recursive=True) if os.path.isfile(match)]
    if not files:
        raise DataError(f"the glob {source} must match files; it matches none from {Path.cwd()}")
    return files, False


def _read_dataset(source: str) -> list[str | None]:
    """The rows of one column of a Hugging Face dataset."""
    name, _, query = source.removeprefix("hf:").partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := options.keys() - {"config", "split", "column"}:
        raise DataError(f"{source} takes the options config, split and column; got {', '.join(sorted(unknown))}")
    dataset, column = _open_dataset(source, name, options), options.get("column", "text")
    if column not in dataset.column_names:
        columns = ", ".join(dataset.column_names)
        raise DataError(f"{source} must have the column {column}; it has {columns}: add ?column=NAME")
    rows = list(dataset[column])
    for index, row in enumerate(rows):
        if not isinstance(row, str | None):
            raise DataError(f"column {column} of {source} must hold strings; row {index} is {type(row).__name__}")
    return rows


def _open_dataset(source: str, name: str, options: dict[str, str]) -> Any:
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


# --- Tokens ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenized text in two parts.

    `train` and `validation` are one-dimensional arrays of token ids: uint16 up to 65,536 tokens of vocabulary, uint32
    above. `fingerprint` is the SHA-256, in hexadecimal, of the ids and of where they are split.
    """

    train: Tokens
    validation: Tokens
    files: tuple[Path, ...]
    skipped: int
    fingerprint: str


def build_corpus(texts: Iterable[str], tokenizer: Tokenizer, context: int, validation_fraction: float) -> Corpus:
    """Order, tokenize and split `texts`; each part gets at least one sequence, `context` + 1 tokens.

    The split is at the end of the document nearest to the fraction of tokens asked for; where no end of a document
    leaves both parts a sequence (one document, say), it is at the very token.

    Raises:
        DataError: a part is shorter than one sequence.
    """
    if not isinstance(texts, Texts):
        texts = Texts(texts)
    # A newline ends each document, so that no two run into one line.
    documents = [text if text.endswith("\n") else text + "\n" for text in texts if text]
    documents.sort(key=lambda text: hashlib.sha256(text.encode("utf-8")).digest())
    ids = tokenizer.encode_batch(documents)
    ends = np.cumsum([len(document) for document in ids], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    dtype: type[Any] = np.uint16 if tokenizer.vocabulary_size <= 1 << 16 else np.uint32
    tokens = np.empty(total, dtype)
    for end, document in zip(ends, ids, strict=True):
        tokens[end - len(document) : end] = document
    split = _split(ends, total, context + 1, validation_fraction)
    fingerprint = hashlib.sha256(f"{split} {tokens.dtype.name} ".encode())
    fingerprint.update(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).data)
    return Corpus(tokens[:split], tokens[split:], texts.files, texts.skipped, fingerprint.hexdigest())


def _split(ends: npt.NDArray[np.int64], total: int, sequence: int, fraction: float) -> int:
    """The number of tokens to train on."""
    target = total - round(total * fraction)
    fitting = ends[(ends >= sequence) & (total - ends >= sequence)]
    split = int(fitting[np.argmin(np.abs(fitting - target))]) if len(fitting) else target
    for part, found in (("training", split), ("validation", total - split)):
        if found < sequence:
            raise DataError(
                f"the {part} text must hold one sequence, {sequence} tokens (context + 1); it has {found} of the "
                f"{total} in all, at validation_fraction {fraction}: give more data, a smaller context or another "
                "fraction"
            )
    return split


# --- Batches ---------------------------------------------------------------------------------------------------


class Batches:
    """Micro-batches of `tokens`, by index: stateless, so that resuming needs the index alone.

    Of the tokens, `sequences` = (len(tokens) - 1) // context sequences are made, without overlap. With a `seed`, each
    epoch is a fresh permutation of them; with None, they come in order (validation). After the last sequence of an
    epoch comes the first of the next, inside a batch too.
    """

    def __init__(self, tokens: Tokens, context: int, batch: int, seed: int | None) -> None:
        if context < 1 or batch < 1 or (seed is not None and seed < 0):
            raise ValueError(
                f"context and batch must be at least 1 and seed 0 or more; got context {context}, batch {batch}, "
                f"seed {seed}"
            )
        self.sequences = (len(tokens) - 1) // context
        if self.sequences < 1:
            raise DataError(f"a sequence needs {context + 1} tokens (context + 1); got {len(tokens)}")
        self._tokens, self._context, self._batch, self._seed = tokens, context, batch, seed

    def at(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Micro-batch `index`, from 0 without end: (inputs, targets), each int64 [batch, context] on the CPU.

        `targets[:, t]` is the token after `inputs[:, t]`.
        """
        if index < 0:
            raise ValueError(f"the index of a batch must be 0 or more; got {index}")
        positions = range(index * self._batch, (index + 1) * self._batch)
        rows = [self._order(position // self.sequences)[position % self.sequences] for position in positions]
        starts = np.array(rows, dtype=np.int64)[:, None] * self._context
        window = self._tokens[starts + np.arange(self._context + 1)].astype(np.int64)  # [batch, context + 1]
        pair = torch.from_numpy(window)
        return pair[:, :-1].contiguous(), pair[:, 1:].contiguous()

    def _order(self, epoch: int) -> Sequence[int] | npt.NDArray[np.int64]:
        return range(self.sequences) if self._seed is None else _permutation(self._seed, epoch, self.sequences)


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    # Sorting raw output: numpy keeps the bits of Philox from release to release, but not what permutation() makes of
    # them, and a resumed run must go on in the same order.
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")
