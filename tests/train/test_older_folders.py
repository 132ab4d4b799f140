"""Folders that c1755f76 wrote still open: a run, a run of two ranks, and the latter packed (tests/fixtures/c1755f76).

Both runs were written in steps of 4 x 32 tokens of `book.txt`: `run` by the recipe delayed to step 12, `sharded` by two
ranks (FSDP2) and the recipe rowwise to step 8. The losses below are those with which c1755f76 went on.
"""

import shutil
import sys
from pathlib import Path

import pytest
from ranks import run_ranks

import octavo as package
from octavo_cli import main

GOES_ON = {"run": (16, 5.392937660217285), "sharded": (12, 5.425895690917969)}  # steps, evaluation loss at the end


@pytest.fixture
def old(tmp_path: Path) -> Path:
    copy = shutil.copytree(Path(__file__).parents[1] / "fixtures" / "c1755f76", tmp_path / "old")
    for settings in copy.glob("*/config.json"):
        settings.write_text(settings.read_text().replace("FOLDER", str(copy)))
    return copy


@pytest.mark.parametrize("name", GOES_ON)
def test_a_run_resumes(printed, records, old: Path, name: str) -> None:
    steps, loss = GOES_ON[name]
    printed("train", "--resume", old / name, "--steps", steps)
    # Two ranks read other batches than one does, so the loss of `sharded` is only near.
    assert records(old / name, "evaluation_loss")[steps] == pytest.approx(loss, rel=1e-4 if name == "run" else 1e-2)


def test_tokens_that_an_older_version_read_are_counted_by_the_batch_of_then(printed, records, old: Path) -> None:
    printed("train", "--resume", old / "run", "--steps", "14", "--batch", "6")
    assert records(old / "run", "tokens")[14] == 12 * 128 + 2 * 6 * 32


def resume_sharded(_rank: int, run: str) -> None:
    sys.argv = ["octavo", "train", "--resume", run, "--steps", "12"]
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0


@pytest.mark.slow
def test_a_run_of_two_ranks_resumes_on_two_ranks(records, old: Path) -> None:
    run_ranks(2, resume_sharded, str(old / "sharded"))
    steps, loss = GOES_ON["sharded"]
    assert records(old / "sharded", "evaluation_loss")[steps] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("name", GOES_ON)
def test_the_watch_of_a_run_is_reported(printed, old: Path, tmp_path: Path, name: str) -> None:
    printed("report", old / name, "--html", tmp_path / "page.html")
    assert "model.layers.0.mlp.down_proj" in (tmp_path / "page.html").read_text()


def test_a_packed_folder_loads_and_verifies(printed, old: Path) -> None:
    assert package.load(old / "packed").get_submodule("model.layers.0.mlp.down_proj").in_features == 32
    printed("verify", old / "packed", "--against", old / "sharded")
