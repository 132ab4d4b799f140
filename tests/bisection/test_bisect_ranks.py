"""A search whose short runs are divided among two processes."""

import warnings

import pytest
from ranks import run_ranks

from octavo.bisection import bisect
from octavo.train.config import Config


def search(rank, folder, settings):
    """The result of a search, and the runs that this rank saw."""
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    made = []
    found = bisect(
        Config.from_dict(settings),
        folder,
        seeds=2,
        steps=2,
        on_run=lambda run, count: made.append((run.part, run.seed)),
    )
    return found.to_dict(), made


@pytest.mark.slow
def test_two_processes_share_each_short_run(settings, tmp_path):
    first, second = run_ranks(2, search, tmp_path / "out", settings().to_dict())
    assert first == second
    assert len(first[1]) == first[0]["runs"] == 4
    alone = bisect(settings(), tmp_path / "alone", seeds=2, steps=2)
    assert [round(loss, 4) for loss in alone.losses] == [round(loss, 4) for loss in first[0]["bf16_losses"]]
    lines = (tmp_path / "out" / "runs.jsonl").read_text().splitlines()
    assert len(lines) == 4, "one rank writes"
