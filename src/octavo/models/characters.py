"""Characters as tokens: every distinct character of the training text has an id.

The vocabulary is small, as that of the byte tokenizer, and a character of several bytes in UTF-8 is one token. A
character that the training text does not contain has no id, and is an error.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from octavo.models.tokenizer_json import character_json, save_tokenizer_json
from octavo.words import some_of


class CharacterTokenizer:
    """The id of a token is the rank of its character among the sorted distinct `characters`. Needs no extra package."""

    chat = None

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = "".join(sorted(set(characters)))
        self._codes = _codes(self.characters)

    @classmethod
    def train(cls, texts: Iterable[str]) -> Self:
        """The characters of `texts`, and the newline, with which each document of a training text ends."""
        return cls(set("\n").union(*texts))

    @property
    def vocabulary_size(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. Raises a ValueError that names the characters without an id."""
        return [int(i) for i in self._encode(text)]

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """The ids of each text, [characters] in uint32. Raises a ValueError that names the characters without an id."""
        return [self._encode(text) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.characters[i] for i in ids)

    def save(self, folder: str | Path) -> None:
        save_tokenizer_json(folder, json.dumps(character_json(self.characters), ensure_ascii=False, indent=1))

    def _encode(self, text: str) -> npt.NDArray[np.uint32]:
        codes = _codes(text)
        ids = np.searchsorted(self._codes, codes)
        known = self._codes[np.minimum(ids, len(self._codes) - 1)] == codes
        if not known.all():
            unknown = [repr(chr(code)) for code in np.unique(codes[~known])]
            raise ValueError(
                f"the tokenizer has no token for {some_of(unknown, 8)}: its tokens are the {self.vocabulary_size} "
                "characters of the text that the model was trained on; leave other characters out"
            )
        return ids.astype(np.uint32)


def _codes(text: str) -> npt.NDArray[np.uint32]:
    # Text of a command line can hold surrogates, which are no characters: report them as unknown, not as a codec error.
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype="<u4")
