"""The data of a run: what it is read from, what the log says of it, and where it is found again."""

import io
import json

import numpy as np
import pytest
import torch
from calibration_examples import write_model
from rich.console import Console

from octavo.train.config import Config
from octavo.train.data import Batches, RandomBatches
from octavo.train.start import resume_run, start_run


@pytest.fixture
def logged(settings):
    """logged(**overrides): the trainer of a new run, and the lines of its log."""

    def make(**overrides):
        out = io.StringIO()
        trainer = start_run(settings(**overrides), Console(file=out))
        return trainer, out.getvalue().splitlines()

    return make


def trained_text(trainer):
    parts = (trainer.data.training._tokens, trainer.data.validation._tokens)
    return bytes(np.concatenate(parts).astype(np.uint8)).decode()


def test_the_log_says_what_was_read_and_skipped(logged, records, text, tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.txt").write_text(text.read_text())
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    (folder / "tokenizer.json").write_text('{"model": "BPE"}')
    trainer, lines = logged(data=(str(folder),))
    assert lines[0].endswith("skipped 2: 1 not UTF-8 (latin.txt), 1 not text by name (tokenizer.json)")
    assert lines[0].startswith("read 1 file (")
    assert trained_text(trainer) == text.read_text() + "\n"
    trainer.run()
    assert records(trainer.run_folder.path, "data")[0] == trainer.data.read.to_dict()
    assert trainer.data.read.to_dict()["skipped"]["not UTF-8"] == {"count": 1, "bytes": 4, "examples": ["latin.txt"]}


def test_rows_are_trained_on_as_text(logged, tmp_path):
    rows = [{"text": f'row {i} with a "quotation"\nand a line'} for i in range(40)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    trainer, lines = logged(data=(str(path),))
    assert lines[0].startswith("read 40 documents from 1 file (")
    found = trained_text(trainer)
    assert sorted(found.split("and a line\n")[:-1]) == sorted(row["text"].removesuffix("and a line") for row in rows)


def test_conversations_need_a_chat_template(logged, tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    with pytest.raises(ValueError, match=r"chat\.jsonl, line 1: a conversation needs the tokenizer's chat template"):
        logged(data=(str(path),))


def test_a_run_goes_on_from_another_directory(settings, tmp_path, text, monkeypatch):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(text.read_text())
    monkeypatch.chdir(tmp_path)
    trainer = start_run(settings(data=("texts", "texts/*.txt"), out="run", steps=4), Console(quiet=True))
    trainer.run()
    data = [f"{tmp_path}/texts", f"{tmp_path}/texts/*.txt"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"] == data
    monkeypatch.chdir("/")
    again = resume_run(tmp_path / "run", ["--steps", "6"], Console(quiet=True))
    assert again.state.step == 4
    again.run()
    monkeypatch.chdir(tmp_path)
    resume_run(tmp_path / "run", ["--data", "texts"], Console(quiet=True))
    assert Config.from_dict(json.loads((tmp_path / "run" / "config.json").read_text())).data == (data[0],)


def test_a_run_on_characters_at_random_offsets_goes_on_exactly(settings, tmp_path, text):
    (tmp_path / "data.txt").write_text(text.read_text().replace("a", "ä"), encoding="utf-8")
    setup = {"data": (str(tmp_path / "data.txt"),), "tokenizer": "characters", "sampling": "random", "recipe": "bf16"}
    first = start_run(settings(**setup, steps=3), Console(quiet=True))
    assert first.data.tokenizer.vocabulary_size == len(set((tmp_path / "data.txt").read_text(encoding="utf-8")))
    assert type(first.data.training) is RandomBatches
    assert type(first.data.validation) is Batches
    first.run()
    resumed = resume_run(tmp_path / "run", ["--steps", "4"], Console(quiet=True))
    assert resumed.data.tokenizer.characters == first.data.tokenizer.characters
    assert all(torch.equal(a, b) for a, b in zip(resumed.data.training.at(9), first.data.training.at(9), strict=True))
    assert resumed.run().step == 4


def test_conversations_are_written_by_the_chat_template_of_the_model(logged, tmp_path):
    write_model(tmp_path / "model", "llama")
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    rows = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(30)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trainer, _ = logged(model=str(tmp_path / "model"), data=(str(tmp_path / "chat.jsonl"),), recipe="bf16")
    assert sorted(trained_text(trainer).splitlines()) == sorted(f"<user>question {i}" for i in range(30))
