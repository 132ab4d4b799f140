"""The texts that octavo generate writes: their tokens, their times, and how they are printed."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console

from octavo_cli.display import say

if TYPE_CHECKING:
    from octavo.generation import Engine, Sampling
    from octavo.models.tokenizer import Tokenizer


@dataclass
class Text:
    """A prompt, and what follows it.

    Attributes:
        prompt: as it was given.
        ids: its tokens.
        text: what follows it so far.
        tokens: the number of tokens of `text`.
        finished: "stop" after a token that ends a text, "length" after the last token that was asked for, else "".
        first_token_seconds: from the begin of its batch to its first token; None without one.
    """

    prompt: str
    ids: list[int] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    finished: str = ""
    first_token_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        names = ("prompt", "text", "tokens", "finished", "first_token_seconds")
        return {name: getattr(self, name) for name in names}


def tokenize(texts: Sequence[Text], tokenizer: Tokenizer, context: int) -> int:
    """Set the tokens of each prompt, and return the largest number of them.

    Raises:
        ValueError: a prompt has no token, or more than the context of the model.
    """
    for number, text in enumerate(texts, 1):
        text.ids = tokenizer.encode(text.prompt)
        which = "the prompt" if len(texts) == 1 else f"prompt {number} of {len(texts)}"
        if not text.ids:
            raise ValueError(f"{which} must hold at least one token, got an empty one: give some text to continue")
        if len(text.ids) > context:
            raise ValueError(f"{which} has {len(text.ids)} tokens, and the model sees {context}: shorten it")
    return max(len(text.ids) for text in texts)


def continue_texts(
    texts: Sequence[Text], engine: Engine, tokenizer: Tokenizer, count: int, sampling: Sampling, stop: Collection[int]
) -> Iterator[None]:
    """Generate up to `count` tokens after each prompt, as one batch. Yields once before them and after each step."""
    from octavo.generation.text import stream_texts

    begin = perf_counter()

    def counted() -> Iterator[list[int | None]]:
        for tokens in engine.generate([text.ids for text in texts], count, sampling, stop):
            for text, token in zip(texts, tokens, strict=True):
                if token is None:
                    text.finished = "stop"
                    continue
                text.tokens += 1
                if text.first_token_seconds is None:
                    text.first_token_seconds = perf_counter() - begin
            yield tokens

    yield
    for pieces in stream_texts(tokenizer, [text.ids for text in texts], counted()):
        for text, piece in zip(texts, pieces, strict=True):
            text.text += piece
        yield
    for text in texts:
        text.finished = "length" if text.tokens == count else "stop"
    yield


class Printer:
    """Prints texts in their order: the first that is not finished as it comes, the others after it."""

    def __init__(self, texts: Sequence[Text]) -> None:
        self.texts = texts
        self.console = Console()
        self.at = 0  # the text that comes next
        self.shown: int | None = None  # characters of it that are printed; None before its prompt is

    def update(self) -> None:
        """Print the text that has come since the last call."""
        while self.at < len(self.texts):
            text = self.texts[self.at]
            if self.shown is None:
                self._begin(text)
                self.shown = 0
            self.console.out(printable(text.text[self.shown :]), end="", highlight=False)
            self.console.file.flush()
            self.shown = len(text.text)
            if not text.finished:
                return
            self.console.out("")
            self.at, self.shown = self.at + 1, None

    def _begin(self, text: Text) -> None:
        if len(self.texts) > 1:
            say(f"--- {self.at + 1} of {len(self.texts)}", "dim")
        self.console.out(printable(text.prompt), end="", style="bold", highlight=False)


def printable(text: str) -> str:
    """`text` with U+FFFD for control characters, which a terminal would obey, other than tabs and ends of lines."""
    return "".join(
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(c) == "Cc" and c not in "\n\t" else c for c in text
    )
