"""The choice of the next token from the logits: p(next | text) = softmax(scores).

The logits are processed in the order of transformers' `generate`:

    repetition penalty   a logit of a token that the text holds is divided by it if positive, else multiplied
                         (Keskar et al. 2019, arXiv:1909.05858, section 4.1)
    temperature          divides all
    top-k                keeps the k largest (Fan et al. 2018, arXiv:1805.04833)
    top-p                keeps the smallest set of the most likely tokens whose probabilities reach p
                         (Holtzman et al. 2019, arXiv:1904.09751)

Nothing here waits for the device.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.models.tokenizer import Tokenizer
from octavo.ops import index_of_largest


@dataclass(frozen=True)
class Sampling:
    """The settings of a draw, as Sampling(temperature=0.8, top_p=0.9). A ValueError names one that is out of range."""

    temperature: float = 1.0  # 0 takes the most likely token, and top-k and top-p change nothing
    top_k: int = 0  # draw from so many most likely tokens; 0 draws from all
    top_p: float = 1.0  # draw from the most likely tokens that together have this probability, in (0, 1]
    repetition_penalty: float = 1.0  # above 1 makes the tokens of the text less likely, its prompt included
    seed: int | None = None  # of the draws; None takes a new one for each generation

    def __post_init__(self) -> None:
        for name, fits, required in (
            ("temperature", 0 <= self.temperature < math.inf, "0 or more"),
            ("top_k", self.top_k >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "from 0 to 2^64 - 1"),
        ):
            if not fits:
                raise ValueError(f"{name} must be {required}, got {getattr(self, name)}")

    def generator(self, device: torch.device) -> torch.Generator:
        """The random numbers of a generation."""
        random = torch.Generator(device)
        random.seed() if self.seed is None else random.manual_seed(self.seed)
        return random

    def chooser(self, random: torch.Generator, padding: Sequence[int] = ()) -> Callable[[Tensor, Tensor], Tensor]:
        """A function that takes ids, int64 [B, n], and logits [B, V] and returns the next tokens, int64 [B]. The first
        `padding[i]` tokens of a row are padding."""
        first = torch.tensor(padding, device=random.device)[:, None] if any(padding) else None

        def choose(ids: Tensor, logits: Tensor) -> Tensor:
            scores = self.process(ids, logits, first)
            return index_of_largest(scores) if self.temperature == 0 else draw(scores, random)

        return choose

    def process(self, ids: Tensor, logits: Tensor, first: Tensor | None = None) -> Tensor:
        """Scores, float32 [B, V], from logits [B, V] after the tokens `ids`, int64 [B, n]; -inf for tokens that are not
        drawn. `first`, int64 [B, 1], is the first token of each row that is not padding; None without padding."""
        scores = logits.float()
        if self.repetition_penalty != 1:
            if first is not None:  # the last token of a row is never padding
                ids = torch.where(torch.arange(ids.shape[1], device=ids.device) < first, ids[:, -1:], ids)
            found, penalty = scores.gather(1, ids), self.repetition_penalty
            scores = scores.scatter(1, ids, torch.where(found < 0, found * penalty, found / penalty))
        if self.temperature == 0:
            return scores
        if self.temperature != 1:
            scores = scores / self.temperature
        if self.top_k:
            least = scores.topk(min(self.top_k, scores.shape[1])).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p < 1:
            ascending, order = scores.sort()
            unlikely = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            unlikely[:, -1] = False  # rounding must not remove the most likely token
            scores = scores.masked_fill(unlikely.scatter(1, order, unlikely), -torch.inf)
        return scores


def draw(scores: Tensor, random: torch.Generator | None = None) -> Tensor:
    """One token of each row of scores [B, V], int64 [B], with the probabilities softmax(scores).

    `torch.multinomial` draws the same tokens, but on a GPU it waits for the device to check the probabilities.
    """
    probabilities = scores.softmax(-1)
    # Of independent exponential times with the rates p, that of token i is the smallest with the probability p[i].
    times = torch.empty_like(probabilities).exponential_(generator=random)
    return (probabilities / times).argmax(-1)


# ---- Token ids to text while they are generated.
#
# A token may hold a part of a character: in UTF-8 a character has up to four bytes, and byte-level tokenizers cut
# between them. Bytes that do not make a character yet decode to U+FFFD at the end of the text. So a `TextStream` holds
# a text that ends with U+FFFD back until the next character shows that it stays.
#
# A tokenizer may decode a token differently after others: some drop the blank at the start of a text. Decoding the
# whole text after each token would be safe, and slow. A `TextStream` decodes the new tokens behind those of the piece
# before them. The more tokens it holds back, the fewer times it decodes them.


class TextStream:
    """The text that follows a prompt of token ids, one token after the other."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        text, tails = tokenizer.decode(prompt), [list(prompt[-size:]) for size in range(8, 20)]
        # Others begin within a character.
        whole = (tail for tail in tails if (last := tokenizer.decode(tail)) and text.endswith(last))
        self.tokenizer, self.ids = tokenizer, next(whole, list(prompt))
        self.given = len(self.ids)  # the first of the ids, whose text was given out

    def add(self, token: int) -> str:
        """The text that the token completes; often a few characters, possibly none."""
        self.ids.append(token)
        held = len(self.ids) - self.given
        piece = "" if held % (1 << max(0, held.bit_length() - 5)) else self.end()  # after a 32nd more, or a 16th
        if not piece or piece.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self.ids = self.ids[self.given :]
        self.given = len(self.ids)
        return piece

    def end(self) -> str:
        """The text that is still held back, once no more tokens come."""
        return self.tokenizer.decode(self.ids)[len(self.tokenizer.decode(self.ids[: self.given])) :]
