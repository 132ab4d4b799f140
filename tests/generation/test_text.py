"""Text from tokens, one at a time, against the decoding of the whole."""

import random

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.generation.text import TextStream, stream_texts
from octavo.models.tokenizer import BpeTokenizer, ByteTokenizer, CharacterTokenizer, Tokenizer

WORDS = ["octavo ", "folio, ", "Grüße\n", "日本語", "😀😀🙃", "é", " ", "  x", "a b", "�"]
BYTES = ByteTokenizer()


def text(seed: int, count: int = 60) -> str:
    return "".join(random.Random(seed).choices(WORDS, k=count))


def byte_level() -> Tokenizer:
    return BpeTokenizer.train(["octavo folio Grüße 日本語 " * 9], 300)


def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: words with a blank before them, which the first loses; other characters are runs of bytes."""
    vocabulary = {"<unk>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}}
    for word in ("▁", "o", "c", "t", "a", "v", "f", "l", "i", ",", "x", "b", "é"):
        vocabulary[word] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return BpeTokenizer(tokenizer)


def characters() -> Tokenizer:
    return CharacterTokenizer("".join(WORDS))


EACH = pytest.mark.parametrize("make", [ByteTokenizer, byte_level, byte_fallback, characters], ids=lambda f: f.__name__)


@EACH
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("begin", [1, 5, 120])
def test_the_pieces_are_the_text(make, seed, begin):
    tokenizer = make()
    ids = tokenizer.encode(text(seed))
    prompt, new = ids[:begin], ids[begin:]
    while tokenizer.decode(prompt).endswith("�"):  # a prompt is text
        prompt, new = ids[: len(prompt) + 1], ids[len(prompt) + 1 :]
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.add(token) for token in new]
    assert tokenizer.decode(prompt) + "".join(pieces) + stream.end() == tokenizer.decode(ids)
    assert max(len(piece) for piece in pieces) < 16  # it comes as it is generated


@EACH
def test_few_tokens_are_decoded_at_a_time(make):
    tokenizer = make()
    ids = tokenizer.encode(text(3, 300))
    sizes = []

    class Counting:
        def decode(self, some):
            sizes.append(len(some))
            return tokenizer.decode(some)

    stream = TextStream(Counting(), ids[:100])
    sizes.clear()
    for token in ids[100:]:
        stream.add(token)
    assert max(sizes) < 64
    assert sum(sizes) < 45 * len(ids)


def test_characters_come_whole_and_at_once():
    stream = TextStream(BYTES, [195, 169])
    pieces = [stream.add(byte) for byte in "aé€😀z".encode()]
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀", "z"]


def test_any_bytes_come_as_their_decoding():
    draw = random.Random(0)
    for _ in range(50):
        ids = [draw.randrange(0x60, 256) for _ in range(60)]
        stream = TextStream(BYTES, b"x")
        assert "".join([stream.add(token) for token in ids]) + stream.end() == bytes(ids).decode(errors="replace")


def test_each_prompt_has_its_text():
    steps = [[65, 195, 66], [67, None, 195], [None, None, 169]]
    found = list(stream_texts(BYTES, [b"a", b"b", b"c"], steps))
    assert found == [["A", "", "B"], ["C", "�", ""], ["", "", "é"], ["", "", ""]]
    assert list(stream_texts(BYTES, [b"a"], [[195]])) == [[""], ["�"]]
