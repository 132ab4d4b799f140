import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from octavo.data import DataError
from octavo.models.tokenizer import Batches, ByteTokenizer, RandomBatches, build_corpus

# --- Corpus


def build(texts, fraction=0.25):
    return build_corpus(texts, ByteTokenizer(), 4, fraction)


def test_documents_are_ordered_by_their_content_and_end_in_a_newline():
    texts = [f"document {n}" for n in range(40)]
    corpus = build(texts)
    everything = bytes(np.concatenate([corpus.train, corpus.validation]).astype(np.uint8)).decode()
    assert everything.endswith("\n")
    assert sorted(everything.splitlines()) == sorted(texts)
    assert everything.splitlines() != texts
    assert build(texts[::-1]).fingerprint == corpus.fingerprint


@pytest.mark.parametrize(
    ("texts", "sizes"),
    [
        ([f"document {n:02}\n" for n in range(40)], (12 * 30, 12 * 10)),
        (["x" * 99], (75, 25)),  # no document ends near
        (["x" * 95, "yyy"], (75, 25)),
    ],
)
def test_split_is_at_the_document_end_nearest_to_the_fraction_or_at_a_token(texts, sizes):
    corpus = build(texts)
    assert (len(corpus.train), len(corpus.validation)) == sizes


def test_fingerprint_tells_tokens_and_split():
    texts = ["x" * 99]
    base = build(texts).fingerprint
    assert len({base, build(["x" * 98 + "y"]).fingerprint, build(texts, fraction=0.5).fingerprint}) == 3


def test_ids_are_16_bits_where_they_fit():
    assert build(["x" * 99]).train.dtype == np.uint16
    tokenizer = SimpleNamespace(vocabulary_size=65537, encode_batch=lambda texts: [np.full(99, 65536, np.uint32)])
    wide = build_corpus(["x" * 99], tokenizer, 4, 0.25)
    assert wide.train.dtype == np.uint32
    assert set(wide.train) == {65536}


@pytest.mark.parametrize(
    ("texts", "fraction", "message"),
    [
        (["x" * 39], 0.1, "validation.*5 tokens.*has 4.*40"),
        (["x" * 39], 0.95, "training.*5 tokens.*has 2.*40"),
        ([], 0.5, "training.*5 tokens.*has 0"),
    ],
)
def test_too_short(texts, fraction, message):
    with pytest.raises(DataError, match=message):
        build(texts, fraction=fraction)


def test_exactly_one_sequence_in_each_part_is_enough():
    corpus = build(["x" * 9], fraction=0.5)
    for part in (corpus.train, corpus.validation):
        inputs, targets = Batches(part, 4, 1, None).at(0)
        assert inputs.shape == targets.shape == (1, 4)


# --- Batches

TOKENS = np.arange(7 * 10 + 1 + 3, dtype=np.uint16)  # 10 sequences of 7, a last target, 3 tokens over


def starts(batches, count):
    return [int(row[0]) // 7 for index in range(count) for row in batches.at(index)[0]]


@pytest.mark.parametrize("kind", [Batches, RandomBatches])
def test_rows_are_consecutive_and_targets_one_further_on(kind):
    inputs, targets = kind(TOKENS, 7, 4, seed=3).at(5)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (4, 7)
    assert torch.equal(inputs + 1, targets)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert kind is RandomBatches or torch.equal(inputs[:, 0] % 7, torch.zeros(4, dtype=torch.int64))


def test_an_epoch_covers_each_sequence_once_in_an_order_of_its_own():
    batches = Batches(TOKENS, 7, 5, seed=0)
    order = starts(batches, 4)
    assert batches.sequences == 10
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]
    assert order[:10] != list(range(10))
    assert starts(Batches(TOKENS, 7, 5, seed=1), 2) != order[:10]


def test_order_stays_the_same_from_release_to_release_and_in_validation_is_that_of_the_text():
    assert starts(Batches(TOKENS, 7, 10, seed=7), 1) == [8, 4, 1, 6, 3, 2, 7, 5, 9, 0]
    assert offsets(RandomBatches(TOKENS, 7, 6, seed=7), 1) == [3, 6, 9, 24, 34, 37]
    assert starts(Batches(TOKENS, 7, 4, seed=None), 5) == [*range(10), *range(10)]


def test_bad_batches():
    for kind in (Batches, RandomBatches):
        with pytest.raises(DataError, match="8 tokens.*got 7"):
            kind(TOKENS[:7], 7, 1, 0)
    with pytest.raises(ValueError, match="batch 0"):
        Batches(TOKENS, 7, 0, 0)


# --- Random offsets


def offsets(batches, count):
    return [int(row[0]) for index in range(count) for row in batches.at(index)[0]]


def test_random_sequences_begin_anywhere():
    batches = RandomBatches(np.arange(20, dtype=np.uint16), 7, 5, seed=0)
    counts = np.bincount(offsets(batches, 520), minlength=13)  # 2,600 draws of 13 offsets
    assert len(counts) == 13  # the last sequence ends in the last token
    expected = 200
    assert ((counts - expected) ** 2 / expected).sum() < 32.9  # chi squared, 12 degrees of freedom: p = 0.001


@pytest.mark.parametrize("batch", [3, 4, 23])
@pytest.mark.parametrize("kind", [Batches, RandomBatches])
def test_sequences_follow_from_seed_and_position_alone(kind, batch):
    """Batches run on across the end of an epoch."""
    one_by_one = offsets(kind(TOKENS, 7, 1, seed=2), 4 * batch)
    batches = kind(TOKENS, 7, batch, seed=2)
    found = {index: batches.at(index)[0][:, 0].tolist() for index in (2, 0, 3, 1)}
    assert [start for index in range(4) for start in found[index]] == one_by_one
    assert offsets(kind(TOKENS, 7, 1, seed=3), 4 * batch) != one_by_one


@pytest.mark.parametrize("kind", [Batches, RandomBatches])
def test_shares_of_a_batch_are_its_parts(kind):
    tokens = np.arange(1000, dtype=np.uint16)
    whole = kind(tokens, 8, 6, 3)
    parts = [kind(tokens, 8, 6, 3, (index, 3)) for index in range(3)]
    for at in (0, 1, 50):
        inputs, targets = zip(*(part.at(at) for part in parts), strict=True)
        assert torch.equal(torch.cat(inputs), whole.at(at)[0])
        assert torch.equal(torch.cat(targets), whole.at(at)[1])
    assert parts[0].size == 2


# --- The data of a run: what it is read from, what the log says of it, and where it is found again


def trained_text(trainer):
    parts = (trainer.training._tokens, trainer.validation._tokens)
    return bytes(np.concatenate(parts).astype(np.uint8)).decode()


def test_what_was_read_and_skipped_is_recorded(begin, records, text, tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.txt").write_text(text.read_text())
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "tokenizer.json").write_text('{"model": "BPE"}')
    trainer = begin(data=(str(folder),))
    assert trained_text(trainer) == text.read_text() + "\n"
    trainer.run()
    assert records(trainer.run_folder.path, "data")[0] == trainer.data.read.to_dict()
    assert trainer.data.read.to_dict()["skipped"]["not UTF-8"] == {"count": 1, "bytes": 4, "examples": ["latin.txt"]}


@pytest.mark.parametrize("sampling", ["epochs", "random"])
@pytest.mark.parametrize("batch", [1, 10**9])
def test_a_batch_has_no_more_sequences_than_the_text(begin, text, sampling, batch):
    found = (len(text.read_bytes()) - 2) // 32  # a lower bound of those in the validation text is left out
    message = r"batch must be at most the \d+ sequences of 32 tokens in the training text, got"
    with pytest.raises(DataError, match=message):
        begin(batch=found + batch, sampling=sampling)


def test_random_offsets_are_of_the_training_text_alone(begin):
    trainer = begin(sampling="random")
    assert (type(trainer.training), type(trainer.validation)) == (RandomBatches, Batches)


def test_conversations_are_written_by_the_chat_template_of_the_model(begin, made, tmp_path):
    shutil.copytree(made("llama"), tmp_path / "model")
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    rows = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(30)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trainer = begin(model=str(tmp_path / "model"), data=(str(tmp_path / "chat.jsonl"),), recipe="bf16")
    assert sorted(trained_text(trainer).splitlines()) == sorted(f"<user>question {i}" for i in range(30))
