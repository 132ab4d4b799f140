"""Text to token ids and back, and to batches of ids: bytes, byte-level BPE, characters, a Hugging Face tokenizer.

In bytes mode the id of a token is a byte of the text in UTF-8: 256 tokens, none unknown, nothing to train. Byte-level
BPE (Sennrich et al., arXiv:1508.07909; over bytes: Radford et al., GPT-2, 2019) starts from the same 256 tokens and
merges frequent neighbours.

On disk, both are a Hugging Face `tokenizer.json`, and bytes mode is a BPE without merges. JSON holds text, so the file
spells each byte as a printable character. A byte that is a printable Latin-1 character, and no blank, stands for
itself; the n-th of the others is the code point 256 + n.
"""

import functools
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.checkpoint.folder import TOKENIZER_FILES, has_tokenizer
from octavo.data import DataError, chat_of
from octavo.data.chat import ChatTemplate
from octavo.util import import_extra, open_local, parse_object, reading, some_of

_BATCH = 64  # texts encoded at once: the encodings of a library hold about 100 bytes a token


class Tokenizer(ABC):
    """The methods that training and sampling need. Ids are in [0, vocabulary_size)."""

    @property
    @abstractmethod
    def vocabulary_size(self) -> int:
        """Number of token ids."""

    @property
    def chat(self) -> ChatTemplate | None:
        """The chat template, which writes a conversation as text with its special tokens; None if there is none."""
        return None

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The ids of `text`; if `special`, with the special tokens that transformers writes around a text."""
        return self.encode_batch([text], special)[0].tolist()

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[npt.NDArray[Any]]:
        """The ids of each text as an array of unsigned integers, [tokens]."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; invalid UTF-8 becomes U+FFFD, and an id without a token nothing."""

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write the files of the tokenizer, for `transformers.AutoTokenizer` and `load_tokenizer`, into `folder`."""


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as tokens: id == byte. Needs no extra package."""

    vocabulary_size = 256

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[npt.NDArray[Any]]:
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def save(self, folder: str | Path) -> None:
        save_tokenizer_json(folder, json.dumps(byte_json(), ensure_ascii=False, indent=1))


class LibraryTokenizer(Tokenizer):
    """A tokenizer of the library tokenizers or transformers, from the file or folder `where`."""

    def __init__(self, tokenizer: Any, where: str | Path = "the trained tokenizer") -> None:
        self._tokenizer, self._where = tokenizer, where

    @abstractmethod
    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        """The ids of a few texts, with special tokens around them or without."""

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[npt.NDArray[Any]]:
        batches = (list(texts[start : start + _BATCH]) for start in range(0, len(texts), _BATCH))
        with reading(self._where, "a tokenizer that encodes this text"):
            return [np.array(ids, dtype=np.uint32) for batch in batches for ids in self._ids(batch, special)]


class BpeTokenizer(LibraryTokenizer):
    """Byte-level BPE: a `tokenizers.Tokenizer` (extra `bpe`). It opens any `tokenizer.json`, and no chat template."""

    @classmethod
    def train(cls, texts: Iterable[str], vocabulary: int) -> Self:
        """Train on `texts` up to `vocabulary` tokens, 256 bytes included; fewer if the texts run out of pairs."""
        tokenizers = _tokenizers()
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        path = Path(folder) / "tokenizer.json"
        tokenizer = _tokenizers().Tokenizer.from_file(str(path))
        tokenizer.no_truncation()  # transformers saves that of its last call, and that of padding
        tokenizer.no_padding()
        return cls(tokenizer, path)

    @property
    def vocabulary_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        return [found.ids for found in self._tokenizer.encode_batch_fast(texts, add_special_tokens=special)]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def save(self, folder: str | Path) -> None:
        save_tokenizer_json(folder, self._tokenizer.to_str())


class HuggingFaceTokenizer(LibraryTokenizer):
    """The tokenizer of a local Hugging Face model folder (extra `hf`); `from_hub` alone downloads."""

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        return cls(open_tokenizer(Path(folder)), folder)

    @classmethod
    def from_hub(cls, name: str) -> Self:
        """The tokenizer of a model on the Hugging Face hub, which is downloaded once, or of a local folder. Raises a
        ValueError, which says why, if it cannot be opened."""
        if Path(name).is_dir():
            return cls.load(name)
        try:
            opened = _auto_tokenizer().from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"the tokenizer hf:{name} cannot be opened ({str(error).splitlines()[0]}): give the name of a model on "
                "the hub (log in with `hf auth login` if it is gated), or a local folder"
            ) from error
        return cls(opened, f"hf:{name}")

    @property
    def vocabulary_size(self) -> int:
        return len(self._tokenizer)

    @property
    def chat(self) -> ChatTemplate | None:
        return chat_of(self._tokenizer)

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        # verbose=False: a whole document is longer than the model's context, and is cut into sequences later.
        encoded = self._tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)
        return encoded["input_ids"]

    def decode(self, ids: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def save(self, folder: str | Path) -> None:
        self._tokenizer.save_pretrained(str(folder))


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Open the tokenizer in `folder`, which needs no extra if it is our bytes or characters without a chat template.
    Raises a FileNotFoundError without files, an ImportError without the extra, a ValueError if damaged."""
    path, config = Path(folder) / "tokenizer.json", Path(folder) / "tokenizer_config.json"
    chats = config.is_file() and "chat_template" in parse_object(config.read_bytes(), str(config))
    chats = chats or config.with_name("chat_template.jinja").is_file()
    if path.is_file() and not chats:
        with reading(path, "a tokenizer that can be opened: take the file from where the model came from"):
            content = parse_object(path.read_bytes(), str(path))
            model, plain = content["model"], not content.get("added_tokens") and content.get("normalizer") is None
            if plain and model.get("vocab") == byte_json()["model"]["vocab"] and not model.get("merges"):
                return ByteTokenizer()
            characters = "".join(model.get("vocab") or ())
            ours = content == character_json(characters)
            return CharacterTokenizer(characters) if ours else BpeTokenizer.load(folder)
    return HuggingFaceTokenizer.load(folder)


def open_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer in `folder`; nothing is downloaded, no code of the folder is run."""
    auto = _auto_tokenizer()
    if not has_tokenizer(folder):  # transformers would make an empty one
        raise FileNotFoundError(f"no tokenizer in {folder}: it needs one of {', '.join(TOKENIZER_FILES)}")
    return open_local(auto, folder)


def _auto_tokenizer() -> Any:
    return import_extra("transformers", "hf", "this tokenizer needs transformers").AutoTokenizer


def _tokenizers() -> Any:
    return import_extra("tokenizers", "bpe", "this tokenizer needs tokenizers")


# ---- The Hugging Face `tokenizer.json` of the tokenizers that need no library.


def save_tokenizer_json(folder: str | Path, tokenizer_json: str) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`, which is created if it is missing."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    # The clean-up of older models ("do n't" to "don't") would not give back the text that was encoded.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def describe_tokenizer(pre_tokenizer: dict[str, Any], decoder: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """The content of a tokenizer.json without a normalizer, special tokens and added tokens."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def byte_characters() -> list[str]:
    """The character that spells each of the 256 bytes in a `tokenizer.json`."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


def byte_json() -> dict[str, Any]:
    """A BPE without merges, whose tokens are the 256 bytes."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {character: byte for byte, character in enumerate(byte_characters())},
        "merges": [],
    }
    return describe_tokenizer(byte_level, byte_level, model)


def character_json(characters: str) -> dict[str, Any]:
    """A tokenizer.json whose token i is the character `characters[i]`. It refuses every other character."""
    every = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    vocabulary = {character: i for i, character in enumerate(characters)}
    # The unknown token is longer than a character and not in the vocabulary, so that an unknown character is an error.
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    return describe_tokenizer(every, {"type": "Fuse"}, model)


# ---- Characters as tokens: every distinct character of the training text has an id; every other one is an error.


class CharacterTokenizer(Tokenizer):
    """The id of a token is the rank of its character among the sorted distinct `characters`. Needs no extra package."""

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        self._ids = {character: i for i, character in enumerate(self.characters)}

    @classmethod
    def train(cls, texts: Iterable[str]) -> Self:
        """The characters of `texts`, and the newline, with which each document of a training text ends."""
        return cls(set("\n").union(*texts))

    @property
    def vocabulary_size(self) -> int:
        return len(self.characters)

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[npt.NDArray[Any]]:
        """The ids of each text, [characters] in uint32. Raises a ValueError that names the characters without an id."""
        if unknown := sorted(set().union(*texts) - self._ids.keys()):
            raise ValueError(
                f"the tokenizer has no token for {some_of([*map(repr, unknown)], 8)}: its tokens are the "
                f"{self.vocabulary_size} characters of the text that the model was trained on; leave other characters "
                "out"
            )
        return [np.fromiter(map(self._ids.__getitem__, text), np.uint32, len(text)) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.characters[i] for i in ids if i < len(self.characters))

    def save(self, folder: str | Path) -> None:
        save_tokenizer_json(folder, json.dumps(character_json(self.characters), ensure_ascii=False, indent=1))


# ---- Text to batches of token ids, where one integer is the position in the data.
#
# Documents are sorted by a hash of their content. That order is as good as a shuffle, and it is the same on every
# machine, whatever the files are called. The documents are tokenized and laid end to end, and the last share is held
# out for validation. A sequence is `context` consecutive tokens, and its targets are those one further on. An epoch
# visits each sequence once, in a permutation drawn from a counter-based generator keyed by (seed, epoch) (Philox:
# Salmon et al., SC 2011, "Parallel random numbers: as easy as 1, 2, 3"). Batch `i` depends on `i` and the seed alone.


Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Corpus:
    """Tokenized text in two parts, arrays [T] of uint16 up to 65,536 tokens of vocabulary, and of uint32 above."""

    train: Tokens
    validation: Tokens
    fingerprint: str  # SHA-256 of the ids and of the position of the split


def build_corpus(texts: Iterable[str], tokenizer: Tokenizer, context: int, validation_fraction: float) -> Corpus:
    """Order, tokenize and split `texts`; each part gets at least one sequence, `context` + 1 tokens, or a DataError.

    The split is at the end of the document that is nearest to the requested fraction of tokens. If no end of a document
    leaves a sequence to both parts (there may be one document only), the split is at the requested token itself.
    """
    tokens, ends = lay_out(texts, tokenizer)
    split = _split(ends, len(tokens), context + 1, validation_fraction)
    fingerprint = hashlib.sha256(f"{split} {tokens.dtype.name} ".encode())
    fingerprint.update(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).data)
    return Corpus(tokens[:split], tokens[split:], fingerprint.hexdigest())


def lay_out(texts: Iterable[str], tokenizer: Tokenizer) -> tuple[Tokens, npt.NDArray[np.int64]]:
    """The tokens of `texts`, ordered and end to end as in a corpus, and where each document ends among them."""
    # A newline ends each document, so that no two run into one line.
    documents = [text if text.endswith("\n") else text + "\n" for text in texts if text]
    documents.sort(key=lambda text: hashlib.sha256(text.encode("utf-8")).digest())
    ids = tokenizer.encode_batch(documents)
    dtype: type[Any] = np.uint16 if tokenizer.vocabulary_size <= 1 << 16 else np.uint32
    tokens = np.concatenate([np.empty(0, dtype), *ids], dtype=dtype, casting="same_kind")
    return tokens, np.cumsum([len(document) for document in ids], dtype=np.int64)


def _split(ends: npt.NDArray[np.int64], total: int, sequence: int, fraction: float) -> int:
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


class Batches:
    """Micro-batches of `tokens`, by index: `sequences` = (len(tokens) - 1) // context sequences without overlap.

    With a `seed`, each epoch is a fresh permutation of them; with None, they come in order (validation). After the last
    sequence of an epoch comes the first of the next, inside a batch too. `share` (index, count): this object gives the
    index-th of count equal shares of each micro-batch of `batch` sequences, which do not depend on it.
    """

    def __init__(
        self, tokens: Tokens, context: int, batch: int, seed: int | None, share: tuple[int, int] = (0, 1)
    ) -> None:
        if context < 1 or batch < 1:
            raise ValueError(f"context and batch must be at least 1; got context {context}, batch {batch}")
        self.sequences = (len(tokens) - 1) // context
        if self.sequences < 1:
            raise DataError(f"a sequence needs {context + 1} tokens (context + 1); got {len(tokens)}")
        index, count = share
        self.context, self.batch = context, batch
        self.size = batch // count
        self.first = index * self.size
        self._tokens, self._seed = tokens, seed

    @property
    def highest(self) -> int:
        """The highest token."""
        return int(self._tokens.max())

    def at(self, index: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of micro-batch `index`, from 0 without end: int64 [batch / count, context] on the CPU."""
        first = index * self.batch + self.first
        starts = self._starts(range(first, first + self.size))[:, None]
        window = self._tokens[starts + np.arange(self.context + 1)].astype(np.int64)  # [size, context + 1]
        pair = torch.from_numpy(window)
        return pair[:, :-1].contiguous(), pair[:, 1:].contiguous()

    def _starts(self, positions: range) -> npt.NDArray[np.int64]:
        """The offsets of the sequences at `positions` of the endless row of sequences."""
        count, seed = self.sequences, self._seed
        rows = [p % count if seed is None else _permutation(seed, p // count, count)[p % count] for p in positions]
        return np.array(rows, dtype=np.int64) * self.context


class RandomBatches(Batches):
    """Micro-batches of sequences at random offsets, each a function of the seed and of its position in the run."""

    def _starts(self, positions: range) -> npt.NDArray[np.int64]:
        # Philox makes four numbers of 64 bits from each value of its counter; a sequence takes the first of them.
        key = np.array([self._seed, 0], dtype=np.uint64)
        drawn = np.random.Philox(key=key, counter=positions.start).random_raw(4 * len(positions))[::4]
        return (drawn % np.uint64(len(self._tokens) - self.context)).astype(np.int64)


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    # Sorting raw output: numpy keeps the bits of Philox from release to release, but not what permutation() makes of
    # them, and a resumed run must go on in the same order.
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")
