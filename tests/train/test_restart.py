"""A job that is started again with the same command continues its run."""

import pytest
from rich.console import Console

from octavo.artifact.lock import LockedError
from octavo.artifact.run import RunFolder
from octavo.train.config import ConfigError
from octavo.train.restart import start_or_resume, was_restarted


@pytest.fixture
def again(settings):
    """again(**overrides): the `Trainer` of a job that is started with these settings, for the first time or again."""
    return lambda **overrides: start_or_resume(settings(**overrides), Console(quiet=True))


def test_a_run_is_begun_and_then_continued(again, tmp_path, text, monkeypatch):
    assert again(recipe="bf16", steps=4, warmup=0).run().step == 4
    monkeypatch.chdir(text.parent)
    trainer = again(recipe="bf16", steps=4, warmup=0, data=(text.name,))  # another way to write the same path
    assert trainer.state.step == 4


def test_what_was_left_before_the_first_checkpoint_is_begun_anew(again, begin, records):
    begin(recipe="bf16", steps=2, warmup=0).lock.close()
    trainer = again(recipe="bf16", steps=2, warmup=0)
    assert trainer.state.step == 0
    trainer.run()
    assert list(records(trainer.run_folder.path)) == [1, 2]


def test_a_run_with_other_settings_is_not_touched(again, begin, tmp_path):
    begin(recipe="bf16", steps=4).run()
    with pytest.raises(
        ConfigError, match="other settings: seed is 0 there, and 1 here. Continue that run with --resume"
    ):
        again(recipe="bf16", steps=4, seed=1)
    assert RunFolder(tmp_path / "run").checkpoints() == [tmp_path / "run" / "step-00000004"]


def test_a_run_in_progress_is_not_touched(again, begin, tmp_path):
    trainer = begin(recipe="bf16", steps=4)
    with pytest.raises(LockedError):
        again(recipe="bf16", steps=4)
    assert trainer.run().step == 4


def test_a_folder_that_holds_something_else_is_refused(again, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty"):
        again(recipe="bf16")
    assert (tmp_path / "run" / "thesis.txt").read_text() == "mine"


def test_torchrun_says_that_it_restarted(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert not was_restarted()
    for count, expected in (("0", False), ("1", True), ("12", True)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        assert was_restarted() is expected
