"""Text to token ids and back, against the library tokenizers and transformers."""

import json
import sys

import numpy as np
import pytest

from octavo.evaluation.prompts import PromptOptions, read_prompts
from octavo.models.tokenizer import (
    BpeTokenizer,
    ByteTokenizer,
    CharacterTokenizer,
    HuggingFaceTokenizer,
    byte_characters,
    load_tokenizer,
    open_tokenizer,
)

# Ranges of characters that have every byte of UTF-8, and each length.
EVERY_LENGTH = [(0, 0x900), (0xFC0, 0xD800, 64), (0xE000, 0x10000, 64), (0x10000, 0x110000, 0x3FFF)]
TEXTS = [
    "def f(x):\n\treturn  x  # don't, I 'm\r\n\n\n",
    " leading and trailing \n ",
    "Grüße, 你好, \U0001f469‍\U0001f469‍\U0001f467 é",
    "<s> <|endoftext|> ĠĊ \x00\x01\x7f ",
    "".join(chr(character) for part in EVERY_LENGTH for character in range(*part)),
]
TEXTS_CHARACTERS = [
    "def f(x):\n\treturn  x  # don't, I 'm\r\n\n\n",
    " Grüße, 你好, e\u0301 \U0001f469\u200d\U0001f467 <s> <unk> Ġ \x01\x7f\u2028",
    "",
]
CORPUS = ["the cat sat on the mat\n" * 20, "import os\nfor the_name in os.listdir('.'):\n    print(the_name)\n" * 20]


@pytest.fixture
def characters():
    return CharacterTokenizer.train(TEXTS_CHARACTERS)


@pytest.fixture(scope="module")
def bpe():
    return BpeTokenizer.train(CORPUS, 280)


def test_byte_ids_are_the_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé\n") == [0x61, 0xC3, 0xA9, 0x0A]
    assert tokenizer.vocabulary_size == 256
    assert [tokenizer.decode(tokenizer.encode(text)) for text in TEXTS] == TEXTS
    assert tokenizer.decode([0x61, 0xFF, 0x62]) == "a\ufffdb"


def test_byte_characters_are_those_of_tokenizers():
    from tokenizers.pre_tokenizers import ByteLevel

    characters = byte_characters()
    assert len(characters) == 256
    assert set(characters) == set(ByteLevel.alphabet())
    assert (characters[0x20], characters[0x0A], characters[0x41]) == ("Ġ", "Ċ", "A")


@pytest.mark.parametrize("kind", ["bytes", "characters"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", None])
def test_transformers_opens_them_with_the_same_ids(tmp_path, characters, kind, model_type):
    transformers = pytest.importorskip("transformers")
    ours, texts = (ByteTokenizer(), TEXTS) if kind == "bytes" else (characters, TEXTS_CHARACTERS)
    ours.save(tmp_path)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path), local_files_only=True)
    assert len(theirs) == ours.vocabulary_size
    for text in texts:
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode([*ours.encode(text), 9999]) == ours.decode([*ours.encode(text), 9999]) == text
    if kind == "characters":
        with pytest.raises(Exception, match="UNK"):
            theirs.encode("Ω")


def test_they_open_again_without_any_extra(tmp_path, characters, monkeypatch):
    for package in ("tokenizers", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    for ours in (ByteTokenizer(), characters):
        ours.save(tmp_path / "deep" / "folder")
        again = load_tokenizer(tmp_path / "deep" / "folder")
        assert type(again) is type(ours)
        assert [again.encode(text) for text in TEXTS_CHARACTERS] == [ours.encode(text) for text in TEXTS_CHARACTERS]
    with pytest.raises(ImportError, match=r'needs tokenizers.*pip install "\.\[bpe\]"'):
        BpeTokenizer.train(CORPUS, 280)


def test_bpe_round_trip(bpe):
    for text in [*TEXTS, *CORPUS]:
        assert bpe.decode(bpe.encode(text)) == text
    assert len(bpe.encode(CORPUS[0])) < 0.6 * len(CORPUS[0])
    assert BpeTokenizer.train(["aa"], 9999).vocabulary_size == 257  # one pair to merge


@pytest.mark.parametrize("load", [load_tokenizer, HuggingFaceTokenizer.load])
def test_saved_tokenizers_give_the_same_ids(tmp_path, bpe, load):
    """Also those that transformers saved after a call, with its truncation and padding."""
    transformers, processors = pytest.importorskip("transformers"), pytest.importorskip("tokenizers.processors")
    bpe.save(tmp_path / "ours")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "ours"), pad_token="!", bos_token="%")
    theirs.backend_tokenizer.post_processor = processors.TemplateProcessing("% $A", None, [("%", theirs.bos_token_id)])
    theirs(TEXTS, truncation=True, max_length=8, padding=True)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    load(tmp_path / "theirs").save(tmp_path / "again")
    ours, *others = (load(tmp_path / name) for name in ("ours", "theirs", "again"))
    for each in (ours, *others):
        assert each.vocabulary_size == 280
        assert [ids.tolist() for ids in each.encode_batch(TEXTS)] == [*map(bpe.encode, TEXTS)]
        assert [each.decode(bpe.encode(text)) for text in TEXTS] == TEXTS
    for each in others:
        assert [each.encode(text, special=True) for text in TEXTS] == theirs(TEXTS)["input_ids"]


@pytest.mark.parametrize("kind", ["bytes", "bpe", "hugging face", "characters"])
def test_encode_batch_is_encode_of_each(tmp_path, bpe, kind):
    """More texts than the library gets at once, each by its own ids."""
    bpe.save(tmp_path)
    texts = [f"{text}{n}" for n, text in enumerate(["", *TEXTS] * 30)]
    make = {
        "bytes": ByteTokenizer,
        "bpe": lambda: bpe,
        "hugging face": lambda: HuggingFaceTokenizer.load(tmp_path),
        "characters": lambda: CharacterTokenizer.train(texts),
    }
    tokenizer = make[kind]()
    arrays = tokenizer.encode_batch(texts)
    assert all(array.dtype.kind == "u" for array in arrays)
    assert [array.tolist() for array in arrays] == [tokenizer.encode(text) for text in texts]
    assert [tokenizer.decode(array.tolist()) for array in arrays] == texts
    assert max(map(np.max, arrays)) < tokenizer.vocabulary_size
    assert tokenizer.encode("") == []


def test_nothing_to_load(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"needs one of tokenizer\.json"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize("kind", ["bpe", "transformers", "prompts"])
def test_a_tokenizer_whose_expression_takes_too_long_is_named(tmp_path, bpe, kind):
    """Onig gives up after a number of retries, and Rust panics: what is raised is no Exception."""
    bpe.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = split
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    text = "a" * 40 + "b"
    if kind == "prompts":
        (tmp_path / "text.txt").write_text(text)
        with pytest.raises(ValueError, match="the tokenizer cannot encode 'aaaa.*retry-limit"):
            read_prompts([str(tmp_path / "text.txt")], open_tokenizer(tmp_path), PromptOptions(1, 8))
        return
    opened = load_tokenizer(tmp_path) if kind == "bpe" else HuggingFaceTokenizer.load(tmp_path)
    for encode in (opened.encode, lambda text: opened.encode_batch([text])):
        with pytest.raises(ValueError, match=rf"{tmp_path}.* is not a tokenizer that encodes this text .*retry-limit"):
            encode(text)


# ---- The tokenizer whose tokens are the characters of the training text


def test_every_distinct_character_is_a_token(characters):
    assert characters.vocabulary_size == len(set("".join(TEXTS_CHARACTERS)))
    for text in TEXTS_CHARACTERS:
        ids = characters.encode(text)
        assert len(ids) == len(text)
        assert characters.decode(ids) == text
    assert CharacterTokenizer.train(["hello\n", "world"]).encode("hello") == [3, 2, 4, 4, 5]  # of "\ndehlorw"
    assert CharacterTokenizer.train(["ab"]).encode("ab\n") == [1, 2, 0]  # the end of a document


def test_unknown_characters_are_named(characters):
    with pytest.raises(ValueError, match=r"no token for 'q', 'Ω', '\\ud800'.*\d\d characters of the text"):
        characters.encode("qx Ω\ud800 qq")
    with pytest.raises(ValueError, match="'!', '%', '&', '\\*', '0', '1', '2', '3' and 3 more"):
        characters.encode("!%&*0123456")
