"""Calibration data: from files to the token ids that a model is shown.

A prompt is what the model would see in service, so it carries the tokenizer's special tokens (the first token of a
sequence draws the largest activations: Sun et al. 2024, arXiv:2402.17762) and, for a conversation, the chat template.
A text file is cut into windows of one context each; a line of JSONL is one prompt, of which the first context counts.

Which prompts are taken depends on their text and the seed alone, not on file names: documents, and the windows of each,
are put in the order of a keyed hash, and every document gives its share before any gives more.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.artifact.text import decode, files_below
from octavo.extras import import_extra

ROW_FIELDS = ("text", "prompt", "messages")
_PROBE = "a"


class PromptError(ValueError):
    """Calibration data that is missing or malformed; the message names the file, and the line where there is one."""


@dataclass(frozen=True, eq=False)
class Prompts:
    """What to run the model on.

    Attributes:
        ids: the token ids of each prompt, longest first, so that neighbours make batches of one length.
        files: what was read.
        skipped: files and rows without text (blank, or binary files that a folder led to).
        fingerprint: SHA-256 of the ids, in hexadecimal.
    """

    ids: tuple[tuple[int, ...], ...]
    files: tuple[Path, ...]
    skipped: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(self.ids).encode()).hexdigest()

    def batches(self, size: int) -> list[tuple[tuple[int, ...], ...]]:
        """Batches of at most `size` prompts of one length: no padding, which would be counted with the tokens."""
        batches: list[list[tuple[int, ...]]] = []
        for ids in self.ids:
            if batches and len(batches[-1]) < size and len(batches[-1][0]) == len(ids):
                batches[-1].append(ids)
            else:
                batches.append([ids])
        return [tuple(batch) for batch in batches]


def has_tokenizer(folder: Path) -> bool:
    """Whether `folder` holds a tokenizer of transformers."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def open_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer in `folder`; nothing is downloaded, no code of the folder is run.

    Raises:
        ImportError: transformers is not installed.
        FileNotFoundError: the folder has no tokenizer.
    """
    transformers = import_extra("transformers", "hf", "text is read through transformers")
    if not has_tokenizer(folder):
        raise FileNotFoundError(f"no tokenizer in {folder}: it needs tokenizer.json or tokenizer_config.json")
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


def read_prompts(data: Sequence[str], tokenizer: Any, *, samples: int, context: int, seed: int = 0) -> Prompts:
    """Choose at most `samples` prompts of at most `context` tokens (fewer where the data has no more).

    Args:
        data: files and folders. `.jsonl` files hold one object a line, with "text" or "prompt" (a string) or "messages"
            (a conversation: a list of {"role", "content"}); every other file is one text in UTF-8. Below a folder,
            hidden files do not count and binary ones are skipped.
        tokenizer: of transformers.

    Raises:
        PromptError: a path that does not exist, a named file that is no text, a line that is no such object, a
            conversation for a tokenizer without a chat template, or no usable prompt at all.
    """
    if samples < 1 or context < 1 or seed < 0:
        raise ValueError(f"need samples >= 1, context >= 1 and seed >= 0, got {samples}, {context} and {seed}")
    files = _find_files(data)
    cutter = _Cutter(tokenizer, context)
    documents: dict[bytes, _Document] = {}  # by hash, which also drops repetitions
    skipped = 0
    for path, named in files.items():
        found = list(_documents(path, named, tokenizer))
        usable = [document for document in found if document.content]
        documents.update((_key(seed, document.content), document) for document in usable)
        skipped += max(len(found), 1) - len(usable)
    share = math.ceil(samples / max(len(documents), 1))
    chosen: list[tuple[int, ...]] = []
    more: list[tuple[int, ...]] = []
    for _, document in sorted(documents.items(), key=lambda item: item[0]):
        windows = sorted(cutter.windows(document), key=lambda ids: _key(seed, ids))
        chosen += windows[:share]
        more += windows[share:]
        if len(chosen) >= samples:
            break
    ids = (chosen + more)[:samples]
    if not ids:
        raise PromptError(
            f"the data must hold at least one prompt; {', '.join(data) or 'nothing'} gave none ({skipped} files or "
            f"rows without text): give text files, folders, or .jsonl files with {' or '.join(ROW_FIELDS)}"
        )
    return Prompts(tuple(sorted(ids, key=lambda ids: (-len(ids), _key(seed, ids)))), tuple(files), skipped)


# --- Files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Document:
    """A text, or (`whole`) one prompt: a text, or the rendered token ids of a conversation."""

    content: str | tuple[int, ...]
    whole: bool


def _find_files(data: Sequence[str]) -> dict[Path, bool]:
    """The files, sorted, and whether each was named itself."""
    files: dict[Path, bool] = {}
    for source in data:
        path = Path(source).expanduser()
        if path.is_file():
            files[path.resolve()] = True
        elif path.is_dir():
            for found in files_below(path.resolve()):
                files.setdefault(found, False)
        else:
            raise PromptError(f"data must name files or folders; there is no {source}")
    return dict(sorted(files.items()))


def _documents(path: Path, named: bool, tokenizer: Any) -> Iterator[_Document]:
    """What a file holds, with empty documents for what has no text."""
    text = decode(path.read_bytes())
    if isinstance(text, int):
        if named or path.suffix == ".jsonl":
            raise PromptError(f"{path} must be text (UTF-8 without NUL); byte {text} is not")
        return
    if path.suffix != ".jsonl":
        yield _Document(text.strip() and text, whole=False)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _row(line, f"{path}, line {number}", tokenizer)


def _row(line: str, where: str, tokenizer: Any) -> _Document:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where}: not valid JSON ({error})") from error
    field = next((name for name in ROW_FIELDS if isinstance(row, dict) and name in row), None)
    if field is None:
        got = f"the keys {', '.join(row)}" if isinstance(row, dict) else type(row).__name__
        raise PromptError(f"{where}: a row must be an object with {' or '.join(ROW_FIELDS)}, got {got}")
    value = row[field]
    if field == "messages":
        return _Document(_render(value, where, tokenizer), whole=True)
    if not isinstance(value, str):
        raise PromptError(f"{where}: {field} must be a string, got {type(value).__name__}")
    return _Document(value.strip() and value, whole=True)


def _render(messages: Any, where: str, tokenizer: Any) -> tuple[int, ...]:
    """The ids of a conversation in the tokenizer's own template, which writes the special tokens itself."""
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
    ):
        raise PromptError(f'{where}: messages must be a list of objects with "role" and "content"')
    if not tokenizer.chat_template:
        raise PromptError(
            f"{where}: a conversation needs the tokenizer's chat template, and the model has none: take a model that "
            "was trained to chat, or give text"
        )
    if not messages:
        return ()
    try:
        return tuple(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))
    except Exception as error:  # a template is a program of the model's author, and may raise anything
        raise PromptError(f"{where}: the chat template does not take these messages ({error})") from error


# --- Tokens ----------------------------------------------------------------------------------------------------------


class _Cutter:
    """Cuts documents into prompts, with the special tokens of the tokenizer around each."""

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._tokenizer, self._context = tokenizer, context
        plain, dressed = self._encode(_PROBE, special=False), self._encode(_PROBE, special=True)
        starts = range(len(dressed) - len(plain) + 1)
        start = next((i for i in starts if dressed[i : i + len(plain)] == plain), None)
        if start is None:
            raise PromptError(
                f"the tokenizer turns {_PROBE!r} into {list(plain)}, and into {list(dressed)} with special tokens, "
                "which must contain the former"
            )
        self._before, self._after = dressed[:start], dressed[start + len(plain) :]
        self._room = context - len(self._before) - len(self._after)
        if self._room < 1:
            raise PromptError(f"a context of {context} tokens has no room beside the special tokens: give a larger one")

    def windows(self, document: _Document) -> list[tuple[int, ...]]:
        if isinstance(document.content, tuple):
            return [document.content[: self._context]]
        ids = self._encode(document.content, special=False)
        stop = min(len(ids), self._room) if document.whole else len(ids)
        return [self._before + ids[i : i + self._room] + self._after for i in range(0, stop, self._room)]

    def _encode(self, text: str, special: bool) -> tuple[int, ...]:
        # verbose=False: a text longer than the model's context is cut here, and needs no warning.
        encoded = self._tokenizer(text, add_special_tokens=special, return_attention_mask=False, verbose=False)
        return tuple(encoded["input_ids"])


def _key(seed: int, content: str | tuple[int, ...]) -> bytes:
    text = content if isinstance(content, str) else json.dumps(content)
    return hashlib.sha256(f"{seed} {text}".encode()).digest()
