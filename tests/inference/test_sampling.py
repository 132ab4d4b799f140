"""How tokens are chosen, against the processors of transformers and torch.multinomial."""

import random
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers

from octavo.inference.sampling import Sampling, TextStream, draw
from octavo.models.tokenizer import BpeTokenizer, ByteTokenizer, CharacterTokenizer, Tokenizer

SETTINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.8, "top_k": 5},
    {"top_k": 999},
    {"top_p": 0.6},
    {"temperature": 0.5, "top_p": 1e-6},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"temperature": 0.9, "top_k": 12, "top_p": 0.8, "repetition_penalty": 1.2},
]


def processors(temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0):
    """In the order of transformers' generate, and only those that it makes."""
    made = (
        repetition_penalty != 1 and transformers.RepetitionPenaltyLogitsProcessor(repetition_penalty),
        temperature != 1 and transformers.TemperatureLogitsWarper(temperature),
        top_k > 0 and transformers.TopKLogitsWarper(top_k),
        top_p < 1 and transformers.TopPLogitsWarper(top_p),
    )
    return transformers.LogitsProcessorList(filter(None, made))


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [3, 9] that repeat each other, and logits [3, 97] with ties."""
    torch.manual_seed(2)
    return torch.randint(97, (3, 9)), (torch.randn(3, 97) * 6).round() / 2


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_transformers(settings: dict[str, float], dtype: torch.dtype) -> None:
    ids, logits = inputs()
    logits = logits.to(dtype)
    before = logits.clone()
    found = Sampling(**settings).process(ids, logits)
    assert found.dtype == torch.float32
    assert torch.equal(found, processors(**settings)(ids, logits.float()))
    assert torch.equal(logits, before)


def test_padding_has_no_penalty() -> None:
    ids, logits = inputs()
    padding = [0, 4, 8]
    ids[1, :4], ids[2, :8] = 0, 0
    logits[:, 0] = 5.0
    sampling = Sampling(repetition_penalty=2.0)
    assert 0 not in ids[0]
    found = sampling.process(ids, logits, torch.tensor(padding)[:, None])
    for row, begin in enumerate(padding):
        alone = ids[row : row + 1, begin:], logits[row : row + 1]
        assert torch.equal(found[row : row + 1], processors(repetition_penalty=2.0)(*alone))


def test_at_temperature_0_a_chooser_takes_the_most_likely_token_and_knows_the_padding() -> None:
    ids = torch.tensor([[5, 5, 5], [0, 0, 5]])
    logits = torch.zeros(2, 9)
    logits[:, 0], logits[:, 5] = 2.0, 3.0
    sampling = Sampling(temperature=0, repetition_penalty=2.0)
    random = sampling.generator(torch.device("cpu"))
    assert sampling.chooser(random, (0, 2))(ids, logits).tolist() == [0, 0]
    assert sampling.chooser(random)(ids, logits).tolist() == [0, 5]  # token 0 counts as one of the second row


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("vocabulary", [7, 5000])
def test_draws_are_those_of_multinomial(vocabulary: int, device: str) -> None:
    scores = (torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(1)) * 3).to(device)
    scores[:, ::3] = -torch.inf
    for seed in range(20):
        random, theirs = (torch.Generator(device).manual_seed(seed) for _ in range(2))
        required = torch.multinomial(scores.softmax(-1), 1, generator=theirs)[:, 0]
        assert torch.equal(draw(scores, random), required)


# ---- Text from tokens, one at a time, against the decoding of the whole


WORDS = ["octavo ", "folio, ", "Grüße\n", "日本語", "😀😀🙃", "é", " ", "  x", "a b", "�"]
BYTES = ByteTokenizer()


def text(seed: int) -> str:
    return "".join(random.Random(seed).choices(WORDS, k=300))


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


TOKENIZERS = {
    "bytes": ByteTokenizer,
    "byte level": lambda: BpeTokenizer.train(["octavo folio Grüße 日本語 " * 9], 300),
    "byte fallback": byte_fallback,
    "characters": lambda: CharacterTokenizer("".join(WORDS)),
}
EACH = pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)


def counted(tokenizer) -> tuple:
    """The tokenizer, and the numbers of tokens that it decodes."""
    sizes = []
    return SimpleNamespace(decode=lambda ids: sizes.append(len(ids)) or tokenizer.decode(ids)), sizes


@EACH
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("begin", [1, 5, 120])
def test_the_pieces_are_the_text_and_few_tokens_are_decoded_at_a_time(make, seed, begin):
    (counting, sizes), ids = counted(tokenizer := make()), tokenizer.encode(text(seed))
    prompt, new = ids[:begin], ids[begin:]
    while tokenizer.decode(prompt).endswith("�"):  # a prompt is text
        prompt, new = ids[: len(prompt) + 1], ids[len(prompt) + 1 :]
    stream = TextStream(counting, prompt)
    sizes.clear()
    pieces = [stream.add(token) for token in new]
    assert max(sizes) < 64
    assert sum(sizes) < 45 * len(ids)
    assert tokenizer.decode(prompt) + "".join(pieces) + stream.end() == tokenizer.decode(ids)
    assert max(len(piece) for piece in pieces) < 16  # it comes as it is generated


def test_characters_come_whole_and_at_once():
    stream = TextStream(BYTES, [195, 169])
    assert [stream.add(byte) for byte in "aé€😀z".encode()] == ["a", "", "é", "", "", "€", "", "", "", "😀", "z"]


@pytest.mark.parametrize(("make", "zero"), [(ByteTokenizer, 0), (byte_fallback, 1)])
def test_any_bytes_come_as_their_decoding(make, zero):
    (counting, sizes), draw = counted(tokenizer := make()), random.Random(0)
    for pool, count in [(range(0x60, 256), 60)] * 50 + [(b"\xff", 2000), (b"\xe2\x82", 2000)]:
        ids = [zero + byte for byte in (255, *draw.choices(pool, k=count), *b"abc")]
        stream = TextStream(counting, prompt := tokenizer.encode("x"))
        found = "x" + "".join([stream.add(token) for token in ids]) + stream.end()
        assert found == tokenizer.decode([*prompt, *ids])
    assert sum(sizes) < 300_000  # a multiple of all 7,200 tokens
