"""Real text for a training benchmark, found on the machine itself: Python source and documentation, as BPE tokens.

Text files of the standard library and of all installed packages; files with the same content count once. Documents lie
in the order of a hash of their content, which is as good as a shuffle and the same on every machine (as in
`octavo.train.data`); the last of them are held out for validation, and the tokenizer learns from the first.

    python -m bench.gpu.gpt_corpus --cache FOLDER       builds it, or tells what the folder holds already
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.models.tokenizer import BpeTokenizer
from octavo.train.config import Config

SUFFIXES = (".py", ".rst", ".md", ".txt")
LARGEST_FILE = 1_000_000  # bytes; what is larger is tables of numbers and generated code
PIECE = 16_384  # characters encoded at once: equal pieces keep all cores busy until the end of a batch
T = TypeVar("T")
Tokens = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Plan:
    """What to build. Of the tokens, at least `validation_tokens` and at least 1 % are held out."""

    vocabulary: int = 50_257
    sample_characters: int = 100_000_000  # text that the tokenizer is trained on
    validation_tokens: int = 2_100_000


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids of the two parts, uint16 [tokens], and where they come from: counts, seconds, and a SHA-256 of both."""

    train: Tokens
    validation: Tokens
    facts: dict[str, Any]


def installed() -> list[Path]:
    """The folders of the standard library and of the installed packages."""
    return sorted({Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")})


def load_or_build(cache: Path, roots: Sequence[Path], plan: Plan) -> Corpus:
    """The corpus in the folder `cache`, built there from the text below `roots` if it is not yet.

    Raises:
        ValueError: too little text, or a cache that was built to another plan.
    """
    described = cache / "corpus.json"
    if not described.exists():
        build(cache, roots, plan)
    facts = json.loads(described.read_text())
    if facts["plan"] != vars(plan):
        raise ValueError(f"{cache} was built for {facts['plan']}, wanted {vars(plan)}: name another --cache")
    return Corpus(np.load(cache / "train.npy"), np.load(cache / "validation.npy"), facts)


def build(cache: Path, roots: Sequence[Path], plan: Plan) -> None:
    """Find, read, tokenize and split; corpus.json is written last, so that an interrupted build is none."""
    seconds: dict[str, float] = {}
    files = _timed("find", seconds, lambda: find(roots))
    documents = _timed("read", seconds, lambda: read(files))
    size = sum(map(len, documents))
    print(f"{len(files)} files, {len(documents)} documents of {size / 1e6:.0f} million characters", flush=True)
    sample = pieces(_first(documents, plan.sample_characters))
    tokenizer = _timed("train tokenizer", seconds, lambda: BpeTokenizer.train(sample, plan.vocabulary))
    tokens, starts = _timed("encode", seconds, lambda: encode(documents, tokenizer))
    cut = split(len(tokens), starts, plan.validation_tokens)
    cache.mkdir(parents=True, exist_ok=True)
    np.save(cache / "train.npy", tokens[:cut])
    np.save(cache / "validation.npy", tokens[cut:])
    facts = {
        "plan": vars(plan),
        "suffixes": SUFFIXES,
        "files": len(files),
        "documents": len(documents),
        "characters": size,
        "train_tokens": cut,
        "validation_tokens": len(tokens) - cut,
        "fingerprint": hashlib.sha256(tokens.data).hexdigest(),
        "seconds": seconds,
    }
    (cache / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")


def find(roots: Iterable[Path]) -> list[Path]:
    """The text files below `roots`, each once."""
    walks = (os.walk(root) for root in roots)
    found = {Path(folder, name) for walk in walks for folder, _, names in walk for name in names}
    return sorted(path for path in found if path.suffix in SUFFIXES)


def read(paths: Sequence[Path]) -> list[str]:
    """The distinct texts in `paths`, in the order of their hash."""
    documents: dict[bytes, str] = {}
    with ThreadPoolExecutor(32) as pool:  # the time goes into waiting for the disk
        for content in pool.map(_content, paths, chunksize=64):
            if content and (text := _decode(content)):
                documents.setdefault(hashlib.sha256(content).digest(), text)
    return [documents[digest] for digest in sorted(documents)]


def pieces(documents: Iterable[str]) -> Iterator[str]:
    """The documents cut into pieces of at most PIECE characters."""
    for document in documents:
        yield from (document[start : start + PIECE] for start in range(0, len(document), PIECE))


def encode(documents: Sequence[str], tokenizer: BpeTokenizer) -> tuple[Tokens, npt.NDArray[np.int64]]:
    """All tokens end to end, and where each document starts in them."""
    counts = [-(-len(document) // PIECE) for document in documents]
    ids = tokenizer.encode_batch(list(pieces(documents)))
    ends = np.cumsum([len(piece) for piece in ids], dtype=np.int64)
    firsts = np.cumsum(counts) - counts  # each document's first piece
    starts = np.concatenate(([0], ends))[firsts]
    tokens = np.empty(int(ends[-1]), np.uint16)
    np.concatenate(ids, out=tokens, casting="same_kind")
    return tokens, starts


def split(total: int, starts: npt.NDArray[np.int64], validation_tokens: int) -> int:
    """The number of tokens to train on: up to the last document start that leaves enough for validation."""
    fitting = starts[(starts > 0) & (total - starts >= max(validation_tokens, total // 100))]
    if not len(fitting):
        raise ValueError(
            f"validation needs {validation_tokens} tokens of whole documents beside some to train on; the text has "
            f"{total} in {len(starts)} documents: give more text"
        )
    return int(fitting[-1])


class Batches:
    """Batches of tokens that lie on the device, in the permutation of a seed (None: in order), epoch after epoch."""

    def __init__(self, tokens: Tokens, config: Config, device: torch.device, count: int, seed: int | None) -> None:
        sequences = (len(tokens) - 1) // config.context
        if not sequences:
            raise ValueError(f"a sequence needs {config.context + 1} tokens, the text has {len(tokens)}: give more")
        random = None if seed is None else torch.Generator().manual_seed(seed)
        self.epochs = count * config.batch / sequences
        epochs = [_order(sequences, random) for _ in range(math.ceil(self.epochs))]
        rows = torch.cat(epochs)[: count * config.batch]
        self._starts = (rows * config.context).view(count, config.batch, 1).to(device)
        self._tokens = torch.from_numpy(tokens.astype(np.int32)).to(device)
        self._positions = torch.arange(config.context, device=device)

    def at(self, index: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets), each int64 [batch, context]; a target is the token after its input."""
        window = self._starts[index] + self._positions
        return self._tokens[window].long(), self._tokens[window + 1].long()


def _order(count: int, random: torch.Generator | None) -> Tensor:
    return torch.arange(count) if random is None else torch.randperm(count, generator=random)


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() and path.stat().st_size <= LARGEST_FILE else b""


def _decode(content: bytes) -> str:
    """The text, ended by a newline; nothing where it is not UTF-8."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return ""
    return text if text.endswith("\n") else text + "\n"


def _first(documents: Iterable[str], size: int) -> Iterator[str]:
    """Documents from the start until they are `size` characters together."""
    for document in documents:
        if size <= 0:
            return
        size -= len(document)
        yield document


def _timed(name: str, seconds: dict[str, float], work: Callable[[], T]) -> T:
    began = time.perf_counter()
    result = work()
    seconds[name] = time.perf_counter() - began
    print(f"corpus: {name} {seconds[name]:.1f} s", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="folder of the tokens")
    print(json.dumps(load_or_build(parser.parse_args().cache, installed(), Plan()).facts, indent=2))


if __name__ == "__main__":
    main()
