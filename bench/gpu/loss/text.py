"""The text of the study: source code on the machine itself, without near-duplicate files, as tokens.

The files are those of Python's standard library and of the installed packages. Packages copy files from one another,
and generate many from one template. A copy in the held-out text rewards memory, and a copy in the training text is a
repetition. So files are taken in the order of a hash of their content, and a file is left out if half of its distinct
lines or more stand in files that were taken before it.

A sequence is `context` tokens and the one after them. A run reads no sequence twice.
"""

import hashlib
import json
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.checkpoint.files import replace_file
from octavo.data import read_text
from octavo.models.tokenizer import BpeTokenizer, lay_out
from octavo.train.config import Config

SUFFIXES = ("py", "pyi", "pyx", "c", "cpp", "cu", "h", "hpp", "cuh", "rst", "md")
SOURCES = ("stdlib", *(f"{sysconfig.get_path('purelib')}/**/*.{suffix}" for suffix in SUFFIXES))
SHORTEST_FILE = 400  # characters
LARGEST_FILE = 1_000_000  # characters; longer files are tables of numbers and generated code
SHORTEST_LINE = 20  # characters of a line that tells files apart
SAMPLE = 30_000_000  # characters that train the tokenizer
LONGEST_TOKEN = 4.0  # characters of a token on average, at the most: more text than this needs is not tokenized


def prepare(folder: Path, config: Config, sources: Sequence[str] = SOURCES) -> dict[str, Any]:
    """Write the tokens that `config` needs to `folder`/tokens.npz, and what they are to text.json; returns the latter.
    The tokenizer is in `folder`/model.

    Raises:
        ValueError: the sources have too little text.
    """
    began = time.monotonic()
    found = [text for text in read_text(sources).texts if SHORTEST_FILE <= len(text) <= LARGEST_FILE]
    found.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    held_out = config.evaluate_batches * config.batch * config.context + 1
    needed = held_out + config.steps * rows_of_step(config) * config.context + 1
    kept = list(first(without_copies(found), int(LONGEST_TOKEN * needed)))
    tokenizer = BpeTokenizer.train(first(kept, SAMPLE), config.vocabulary)
    tokenizer.save(folder / "model")
    tokens, _ = lay_out(kept, tokenizer)
    if len(tokens) < needed:
        raise ValueError(
            f"{config.steps} steps without a repetition take {needed:,} tokens; the text has {len(tokens):,}"
        )
    facts = {
        "sources": f"Python's standard library and the installed packages: {', '.join(SUFFIXES)}",
        "files": len(found),
        "documents": len(kept),
        "characters": sum(map(len, kept)),
        "training_tokens": len(tokens) - held_out,
        "held_out_tokens": held_out - 1,
        "fingerprint": hashlib.sha256(tokens.tobytes()).hexdigest(),
        "seconds": round(time.monotonic() - began, 1),
    }
    replace_file(folder / "text.json", json.dumps(facts))
    with whole(folder / "tokens.npz") as part:
        np.savez(part, held_out=tokens[:held_out], training=tokens[held_out:])
    return facts


def rows_of_step(config: Config) -> int:
    """The sequences that an optimizer step reads."""
    return config.batch * config.accumulate


def first(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Texts from the start until they have so many characters together."""
    for text in texts:
        if characters <= 0:
            return
        characters -= len(text)
        yield text


def without_copies(texts: Iterable[str]) -> Iterator[str]:
    """The texts of which more than half of the distinct lines are in no text given before."""
    seen: set[int] = set()
    for text in texts:
        lines = {hash(stripped) for line in text.splitlines() if len(stripped := line.strip()) >= SHORTEST_LINE}
        if 2 * len(lines & seen) < len(lines):
            seen |= lines
            yield text


def read_tokens(folder: Path, part: str, context: int, device: torch.device) -> Tensor:
    """The sequences of "training" or "held_out", int32 [sequences, context + 1] on `device`."""
    with np.load(folder / "tokens.npz") as arrays:
        tokens = torch.from_numpy(arrays[part].astype(np.int32)).to(device)
    return tokens.unfold(0, context + 1, context)


def reading_order(sequences: int, branch_step: int, batch: int, order: int | None) -> Tensor:
    """The sequences in the order in which a run reads them, int64 [sequences].

    All runs begin as the trunk does, which has the order None. From `branch_step` on, a data order reads those that the
    trunk has not read yet in a permutation of its own.
    """
    rows = torch.randperm(sequences, generator=torch.Generator().manual_seed(0))
    if order is None:
        return rows
    read, rest = rows[: branch_step * batch], rows[branch_step * batch :]
    return torch.cat((read, rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(order))]))


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write for `path`, which another process waits for: it is whole, or not there."""
    part = path.with_name(f"part-{path.name}")
    yield part
    part.rename(path)
