"""The tokenizer whose tokens are the characters of the training text."""

import json
import sys

import numpy as np
import pytest

from octavo.models.characters import CharacterTokenizer
from octavo.models.tokenizer import load_tokenizer

TEXTS = [
    "def f(x):\n\treturn  x  # don't, I 'm\r\n\n\n",
    " Grüße, 你好, e\u0301 \U0001f469\u200d\U0001f467 <s> <unk> Ġ \x01\x7f\u2028",
    "",
]


@pytest.fixture
def characters():
    return CharacterTokenizer.train(TEXTS)


def test_every_distinct_character_is_a_token(characters):
    assert characters.vocabulary_size == len(set("".join(TEXTS)))
    for text in TEXTS:
        ids = characters.encode(text)
        assert len(ids) == len(text)
        assert characters.decode(ids) == text
    assert CharacterTokenizer.train(["hello\n", "world"]).encode("hello") == [3, 2, 4, 4, 5]  # of "\ndehlorw"


def test_a_document_may_end_in_a_newline_that_the_texts_lack():
    assert CharacterTokenizer.train(["ab"]).encode("ab\n") == [1, 2, 0]


def test_a_batch_is_encoded_as_each_text_is(characters):
    arrays = characters.encode_batch(TEXTS)
    assert all(np.issubdtype(array.dtype, np.unsignedinteger) for array in arrays)
    assert [array.tolist() for array in arrays] == [characters.encode(text) for text in TEXTS]


def test_unknown_characters_are_named(characters):
    with pytest.raises(ValueError, match=r"no token for 'q', 'Ω', '\\ud800'.*\d\d characters of the text"):
        characters.encode("qx Ω\ud800 qq")
    with pytest.raises(ValueError, match="'!', '%', '&', '\\*', '0', '1', '2', '3' and 3 more"):
        characters.encode("!%&*0123456")


def test_it_opens_again_without_any_extra(characters, tmp_path, monkeypatch):
    characters.save(tmp_path / "deep" / "folder")
    for package in ("tokenizers", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    again = load_tokenizer(tmp_path / "deep" / "folder")
    assert isinstance(again, CharacterTokenizer)
    assert [again.encode(text) for text in TEXTS] == [characters.encode(text) for text in TEXTS]


def test_transformers_opens_it_with_the_same_ids_and_text(characters, tmp_path):
    transformers = pytest.importorskip("transformers")
    characters.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for text in TEXTS:
        assert theirs.encode(text) == characters.encode(text)
        assert theirs.decode(characters.encode(text)) == text
    assert len(theirs) == characters.vocabulary_size
    with pytest.raises(Exception, match="UNK"):
        theirs.encode("Ω")
