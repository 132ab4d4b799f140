"""Calibration data: what is read, what is chosen, and what is refused."""

import json
from pathlib import Path

import pytest
from tiny_models import with_slow
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from octavo.data import DataError, chat_of, read_text
from octavo.evaluation.prompts import PromptOptions, read_prompts
from octavo.models.tokenizer import ByteTokenizer, CharacterTokenizer, open_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"


@pytest.fixture
def byte_tokens(tmp_path):
    """Bytes as ids: no special tokens, no chat template."""
    ByteTokenizer().save(tmp_path / "tokenizer")
    return open_tokenizer(tmp_path / "tokenizer")


def dressed_tokenizer() -> PreTrainedTokenizerFast:
    """Words as ids, between [CLS] = 0 and [SEP] = 1."""
    words = {"[CLS]": 0, "[SEP]": 1, "[UNK]": 2} | {f"w{i}": 10 + i for i in range(90)} | {"a": 100}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 0), ("[SEP]", 1)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def write_rows(path: Path, rows: list[object]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return str(path)


def texts(prompts):
    return sorted(bytes(ids).decode() for ids in prompts.ids)


def test_text_is_cut_into_windows_and_rows_to_their_beginning(tmp_path, byte_tokens):
    (tmp_path / "a.txt").write_text("0123456789abcdefghijKL")
    rows = write_rows(tmp_path / "b.jsonl", [{"text": "x" * 25}, {"prompt": "short", "other": 1}, {"text": "  "}])
    prompts = read_prompts([str(tmp_path / "a.txt"), rows], byte_tokens, PromptOptions(100, 10))
    assert texts(prompts) == ["0123456789", "KL", "abcdefghij", "short", "x" * 10]
    assert [len(ids) for ids in prompts.ids] == [10, 10, 10, 5, 2]
    assert prompts.tokens == 37
    assert prompts.report.files == [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    assert prompts.report.skipped["empty"].examples == ["b.jsonl, line 3"]


def test_the_choice_follows_the_seed_and_the_text_not_the_files(tmp_path, byte_tokens):
    rows = [{"text": f"row {i}"} for i in range(200)]
    one = write_rows(tmp_path / "one.jsonl", rows)
    other = [write_rows(tmp_path / "z.jsonl", rows[90:]), write_rows(tmp_path / "y.jsonl", rows[:90][::-1] + rows[:5])]
    pairs = (([one], 4), (other, 4), ([one], 5))
    chosen = [read_prompts(data, byte_tokens, PromptOptions(20, 9, seed=seed)) for data, seed in pairs]
    assert chosen[0].ids == chosen[1].ids
    assert chosen[0].fingerprint == chosen[1].fingerprint != chosen[2].fingerprint
    assert set(chosen[0].ids) != set(chosen[2].ids)
    assert all(len(set(c.ids)) == 20 for c in chosen)


def test_every_document_gives_its_share_before_any_gives_more(tmp_path, byte_tokens):
    (tmp_path / "data").mkdir()
    for name, length in (("a", 1000), ("b", 1000), ("c", 7)):
        (tmp_path / "data" / name).write_text("".join(f"{name}{i:03}" for i in range(length // 4 + 1))[:length])

    def counts(samples: int) -> list[int]:
        found = texts(read_prompts([str(tmp_path / "data")], byte_tokens, PromptOptions(samples, 8)))
        return [sum(text[0] == name for text in found) for name in "abc"]

    assert counts(7) == [3, 3, 1]
    assert sum(counts(9)) == 9
    assert min(counts(9)[:2]) >= 3
    assert counts(500) == [125, 125, 1]


def test_special_tokens_stand_around_every_window(tmp_path):
    (tmp_path / "a.txt").write_text(" ".join(f"w{i}" for i in range(7)))
    rows = write_rows(tmp_path / "b.jsonl", [{"text": "w20 w21 w22 w23 w24"}])
    prompts = read_prompts([str(tmp_path / "a.txt"), rows], dressed_tokenizer(), PromptOptions(9, 5))
    assert set(prompts.ids) == {(0, 10, 11, 12, 1), (0, 13, 14, 15, 1), (0, 16, 1), (0, 30, 31, 32, 1)}
    with pytest.raises(DataError, match="no room beside the special tokens"):
        read_prompts([rows], dressed_tokenizer(), PromptOptions(9, 2))


def test_conversations_go_through_the_chat_template(tmp_path, byte_tokens):
    messages = [{"role": "user", "content": "hi"}, {"role": "bot", "content": "ho"}]
    rows = write_rows(tmp_path / "chat.jsonl", [{"messages": messages}, {"messages": []}])
    with pytest.raises(DataError, match=r"chat\.jsonl, line 1: a .* chat template, and this .* rows with text"):
        read_prompts([rows], byte_tokens, PromptOptions(4, 99))
    byte_tokens.chat_template = TEMPLATE
    assert texts(read_prompts([rows], byte_tokens, PromptOptions(4, 99))) == ["<user>hi<bot>ho"]
    assert texts(read_prompts([rows], byte_tokens, PromptOptions(4, 8))) == ["<user>hi"]
    byte_tokens.chat_template = "{{ raise_exception('never a bot') }}"
    with pytest.raises(DataError, match=r"line 1: the chat template does not take these messages \(never a bot\)"):
        read_prompts([rows], byte_tokens, PromptOptions(4, 8))


def test_the_text_of_a_conversation_gives_the_ids_of_the_chat_template(tmp_path):
    tokenizer = dressed_tokenizer()
    tokenizer.chat_template = "[CLS] {% for m in messages %}{{ m['role'] }} {{ m['content'] }} [SEP] {% endfor %}"
    tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    messages = [{"role": "w1", "content": "w2 w3"}, {"role": "w4", "content": "w5"}]
    rows = write_rows(tmp_path / "chat.jsonl", [{"messages": messages}])
    (ids,) = read_prompts([rows], tokenizer, PromptOptions(1, 99)).ids
    assert ids == (0, 11, 12, 13, 1, 14, 15, 1)
    assert list(ids) == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


HOSTILE = {
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 1 s"),
    "a repetition": ("{{ 'x' * 9999999999 }}", "needs more than 100 MB"),
    "doubling": (
        "{% set s = namespace(x='ab') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}{{ s.x }}",
        "needs more than 100 MB",
    ),
}


@pytest.mark.parametrize("name", with_slow(HOSTILE, ("loops", "a repetition")))
def test_a_chat_template_has_bounds_of_time_and_memory(tmp_path, byte_tokens, monkeypatch, name):
    monkeypatch.setattr("octavo.data.chat.SECONDS", 1)
    monkeypatch.setattr("octavo.data.chat.MEGABYTES", 100)
    template, message = HOSTILE[name]
    byte_tokens.chat_template = "{% if messages[0].role == 'user' %}" + template + "{% endif %}calm"
    chat, rows = chat_of(byte_tokens), tmp_path / "chat.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    with pytest.raises(DataError, match=f"line 1: the chat template does not take these messages .*{message}"):
        read_text([str(rows)], chat)
    assert chat([{"role": "bot", "content": "ho"}]) == "calm"  # the process goes on, or begins anew


def test_a_process_for_chat_templates_that_does_not_begin(byte_tokens, monkeypatch):
    byte_tokens.chat_template = TEMPLATE
    monkeypatch.setattr("sys.executable", "false")
    with pytest.raises(ValueError, match="its process ended: 1"):
        chat_of(byte_tokens)([{"role": "user", "content": "hi"}])


def test_batches_hold_prompts_of_one_length(tmp_path, byte_tokens):
    lengths = [3, 5, 5, 3, 5, 2, 5, 5]
    rows = write_rows(tmp_path / "a.jsonl", [{"text": str(i) * n} for i, n in enumerate(lengths)])
    prompts = read_prompts([rows], byte_tokens, PromptOptions(20, 8))
    batches = prompts.batches(3)
    assert [[len(ids) for ids in batch] for batch in batches] == [[5, 5, 5], [5, 5], [3, 3], [2]]
    assert tuple(tuple(ids.tolist()) for batch in batches for ids in batch) == prompts.ids
    assert [batch.shape for batch in prompts.batches(3, shortest=3)] == [(3, 5), (2, 5), (2, 3)]
    with pytest.raises(DataError, match="every prompt is one token long"):
        read_prompts([rows], byte_tokens, PromptOptions(20, 1)).batches(3, shortest=2)


def test_no_usable_prompt(tmp_path, byte_tokens):
    (tmp_path / "empty.txt").write_text("\n")
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": ""}, {"prompt": " "}])
    with pytest.raises(DataError, match=r"gave none: read 0 files \(0 bytes\); skipped 3: 3 empty \(empty\.txt"):
        read_prompts([str(tmp_path / "empty.txt"), rows], byte_tokens, PromptOptions(4, 8))
    with pytest.raises(ValueError, match="must be at least 1 and seed at least 0, got samples 0, context 8"):
        read_prompts([rows], byte_tokens, PromptOptions(0, 8))


def test_a_tokenizer_of_characters_names_what_it_does_not_know(tmp_path):
    CharacterTokenizer.train(["ACGT"]).save(tmp_path / "characters")
    tokenizer = open_tokenizer(tmp_path / "characters")
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "GATTACA"}])
    assert read_prompts([rows], tokenizer, PromptOptions(1, 9)).ids == ((3, 1, 4, 4, 1, 2, 1),)
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "GATTACA"}, {"text": "a gene"}])
    with pytest.raises(DataError, match=r"cannot encode 'a gene'.*no token for ' ', 'a', 'e', 'g', 'n'"):
        read_prompts([rows], tokenizer, PromptOptions(2, 9))


def test_a_tokenizer_in_the_files_of_gpt2(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text("a b\n")
    assert open_tokenizer(tmp_path)("abb")["input_ids"] == [2, 1]
