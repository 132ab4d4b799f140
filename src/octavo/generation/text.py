"""Token ids to text while they are generated.

A token may hold a part of a character: in UTF-8 a character has up to four bytes, and byte-level tokenizers cut between
them. Bytes that do not make a character yet decode to U+FFFD at the end of the text. So a `TextStream` holds U+FFFD at
the end back until the next character shows that it stays.

A tokenizer may decode a token differently after others: some drop the blank at the start of a text. Decoding the whole
text after each token would be safe, and slow. A `TextStream` decodes the last tokens only, from one at which the
tokenizer decodes them as it does in the text.
"""

from collections.abc import Iterable, Iterator, Sequence

from octavo.models.tokenizer import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_FEW, _MANY = range(8, 20), 32  # tokens that are decoded after each new one: at least, and usually at most


class TextStream:
    """The text that follows a prompt, one token after the other.

    Args:
        tokenizer: of the model.
        prompt: token ids.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.ids = list(prompt)  # the last tokens of the text
        self.text = tokenizer.decode(self.ids)
        self.shown = len(self.text)  # characters of `text` that were given out
        self._forget()

    def add(self, token: int) -> str:
        """The text that the token completes; often a few characters, possibly none."""
        self.ids.append(token)
        self.text = self.tokenizer.decode(self.ids)
        piece = self._give(len(self.text.rstrip(_INCOMPLETE)))
        if len(self.ids) > _MANY and self.shown == len(self.text):
            self._forget()
        return piece

    def end(self) -> str:
        """The text that is still held back, once no more tokens come."""
        return self._give(len(self.text))

    def _give(self, end: int) -> str:
        piece = self.text[self.shown : end]
        self.shown = max(self.shown, end)
        return piece

    def _forget(self) -> None:
        """Forget tokens whose text is given out, if the last ones decode to the end of the text without them."""
        for size in _FEW:  # the last tokens may begin within a character
            last = self.tokenizer.decode(self.ids[-size:])
            if last and self.text.endswith(last):
                self.ids, self.text, self.shown = self.ids[-size:], last, len(last)
                return


def stream_texts(
    tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], steps: Iterable[Sequence[int | None]]
) -> Iterator[list[str]]:
    """Yield the text that each step adds to each prompt.

    Args:
        tokenizer: of the model.
        prompts: token ids.
        steps: the next token of each prompt; None after its end.
    """
    streams = [TextStream(tokenizer, prompt) for prompt in prompts]
    for tokens in steps:
        yield [s.end() if token is None else s.add(token) for s, token in zip(streams, tokens, strict=True)]
    yield [s.end() for s in streams]
