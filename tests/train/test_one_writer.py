"""A run's folder belongs to one program: a second one is refused at once and the first one finishes unharmed."""

import pytest

from octavo.artifact.lock import LockedError
from octavo.train.config import ConfigError


def test_a_second_start_and_a_resume_of_a_live_run_are_refused(begin, go_on, records, tmp_path):
    trainer = begin(recipe="bf16")
    step = trainer.step

    def disturbed():
        with pytest.raises(LockedError, match=f"{tmp_path}/run is in use: process"):
            begin(recipe="bf16")
        if trainer.state.step > 4:
            with pytest.raises(LockedError, match="is in use"):
                go_on(tmp_path / "run")
        return step()

    trainer.step = disturbed
    assert trainer.run().step == 8
    assert list(records(tmp_path / "run")) == list(range(1, 9))
    assert not list(tmp_path.glob(".*"))
    assert go_on(tmp_path / "run").state.step == 8


def test_two_resumes_at_once_go_on_with_one(begin, go_on, tmp_path):
    begin(recipe="bf16").run()
    first = go_on(tmp_path / "run", "--steps", "10")
    with pytest.raises(LockedError):
        go_on(tmp_path / "run", "--steps", "12")
    assert first.run().step == 10


def test_a_start_that_fails_gives_the_folder_back(begin, tmp_path):
    with pytest.raises(ConfigError, match="a local Hugging Face folder; ./nowhere is none"):
        begin(model="./nowhere")
    begin(recipe="bf16", steps=2, warmup=0).run()


def test_a_run_is_not_made_in_a_file(begin, tmp_path):
    (tmp_path / "afile").write_text("mine")
    with pytest.raises(FileExistsError, match="afile is a file: --out must name the folder"):
        begin(out=str(tmp_path / "afile"))
    assert (tmp_path / "afile").read_text() == "mine"
