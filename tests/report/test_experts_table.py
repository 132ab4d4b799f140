"""The experts of a run on the page of `octavo report`."""

import numpy as np
from report_examples import make_run

from octavo.report.runs import read_runs
from octavo.report.training_page import expert_rows, page_of_runs
from octavo.watching.storage import EXPERTS, read_watch


def records(steps):
    found = np.zeros(len(steps), EXPERTS)
    found["step"], found["layer"], found["experts"], found["fullest"], found["idle"] = steps, 2, 8, 5, 1
    found["load"] = 1 + np.arange(len(steps))
    found["worst"], found["sqnr"] = (3, 0, 7), (27.125, np.nan, 30.0)
    return found


def test_the_last_sample_is_a_table(tmp_path):
    run = make_run(tmp_path / "run", steps=20)
    (run / "watch" / "experts.bin").write_bytes(records([10, 20]).tobytes())
    (row,) = expert_rows(read_watch(run))
    name = read_watch(run).layers[2].name
    assert list(row.values()) == [name, "2.00x, expert 5", "1 of 8", "expert 3, 27.1 dB", "", "expert 7, 30.0 dB"]
    page = page_of_runs(read_runs([run])).html()
    assert "<h2>Experts</h2>" in page
    assert "expert 3, 27.1 dB" in page


def test_a_run_without_experts_has_no_table(tmp_path):
    run = make_run(tmp_path / "run", steps=20)
    (run / "watch" / "experts.bin").unlink()  # of an older version
    assert expert_rows(read_watch(run)) == []
    assert "<h2>Experts</h2>" not in page_of_runs(read_runs([run])).html()
