"""Reading runs: whole ones, half-written ones, and those of other trainers."""

import json
import math
import re

import numpy as np
import pytest
from report_examples import make_run, write_metrics

from octavo.checkpoint.files import ArtifactError
from octavo.report.training_page import expert_rows, page_of_runs, recipe_rows, run_facts, to_dict
from octavo.train.run_records import read_runs, read_series
from octavo.watching.storage import EXPERTS


def test_a_run_of_octavo_train(tmp_path):
    (run,) = read_runs([make_run(tmp_path / "run")])
    assert run.name == "run"
    assert run.last_step == 200
    assert run.settings["recipe"] == "rowwise"
    assert run.series["loss"].steps.tolist() == list(range(1, 201))
    assert run.series["evaluation_loss"].steps.tolist() == list(range(10, 201, 10))
    assert len(run.watched.layers) == 13
    assert run.remarks == []
    facts = run_facts(run)
    assert facts["GEMMs"] == "36 fp8, 3 bf16"
    assert facts["layers watched"] == "13, every 10 steps"
    assert facts["events"] == "1"


def test_a_run_that_is_being_written(tmp_path):
    write_metrics(tmp_path, 5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    (run,) = read_runs([tmp_path])
    assert run.last_step == 5
    assert run.watched is None
    assert "The last line of metrics.jsonl is incomplete" in run.remarks[0]
    assert "The run was not watched" in run.remarks[1]


def test_a_run_that_has_logged_nothing_and_a_watch_alone(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    (run,) = read_runs([tmp_path])
    assert (run.last_step, run.series) == (0, {})
    assert run.remarks[0] == "The run has logged no loss."
    make_run(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (run,) = read_runs([tmp_path])
    assert (run.last_step, len(run.watched.layers), run.settings) == (200, 13, {})


def test_a_damaged_watch_leaves_the_loss(tmp_path):
    (make_run(tmp_path) / "watch" / "layers.json").write_text("{")
    (run,) = read_runs([tmp_path])
    assert run.watched is None
    assert len(run.series["loss"].steps) == 200
    assert re.match(r"Figures of the layers are missing: .* is not valid JSON", run.remarks[0])


def test_damaged_lines_of_events_and_a_cut_record_of_the_watch_are_left_out(tmp_path):
    make_run(tmp_path)
    with (tmp_path / "watch" / "events.jsonl").open("a") as file:
        file.write("{\n[]\n")
    (run,) = read_runs([tmp_path])
    assert (len(run.watched.layers), len(run.watched.events)) == (13, 1)
    assert run.remarks == ["watch/events.jsonl has 2 damaged lines, left out here: line 2, 3."]
    path = tmp_path / "watch" / "operands.bin"
    path.write_bytes(path.read_bytes()[:-7])
    assert len(read_runs([tmp_path])[0].watched.operands) == 20 * 39 - 1
    path.write_bytes(b"")
    (run,) = read_runs([tmp_path])
    assert any(re.match(r"The watch has no sample yet\. A loop .* must call `step\(\)`", each) for each in run.remarks)


def test_inf_and_nan_are_gaps_and_are_named(tmp_path):
    last = {"step": 3, "loss": math.nan, "gradient_norm": math.inf}
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, last]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = read_runs([tmp_path])
    assert run.series["loss"].wrong_steps == [2, 3]
    assert run.series["loss"].last is None
    assert run.series["loss"].finite == {1: 2.0}
    assert (run.series["gradient_norm"].last, run.series["gradient_norm"].finite) == (None, {})
    assert "loss is inf or NaN at step 2, and 1 more." in run.remarks
    facts = run_facts(run)
    assert facts["inf or NaN"] == "3 values"
    assert facts["loss"] == "inf or NaN at step 3, 2.0000 at step 1"
    summary = to_dict(run)["series"]["loss"]
    assert (summary["last"], summary["last_number"]) == (None, 2.0)


def test_events_from_which_the_run_went_back_count_apart(tmp_path):
    make_run(tmp_path)
    path = tmp_path / "watch" / "events.jsonl"
    (line,) = path.read_text().splitlines()
    path.write_text(line + "\n" + json.dumps(json.loads(line) | {"undone": True}) + "\n")
    runs = read_runs([tmp_path])
    assert run_facts(runs[0])["events"] == "1, and 1 of steps from which the run went back"
    html = page_of_runs(runs).html()
    assert html.count("<td>undone</td>") == 1
    assert len(json.loads(html.partition('id="data">')[2].partition("</script>")[0])["charts"][0]["marks"]) == 1


def test_a_step_that_came_twice_counts_once():
    series = read_series([{"step": 2, "loss": 1}, {"step": 1, "loss": 3}, {"step": 2, "loss": 2}], "run")["loss"]
    np.testing.assert_array_equal(series.steps, [1, 2])
    np.testing.assert_array_equal(series.values, [3.0, 2.0])


def test_a_run_that_was_not_watched_shows_its_recipes(tmp_path):
    recipes = {"rowwise": {"y": "cublaslt", "dx": "cublaslt", "dw": "bf16", "layers": ["a", "b"]}}
    write_metrics(tmp_path, 2, precision={"recipes": recipes})
    runs = read_runs([tmp_path])
    (row,) = recipe_rows(runs[0].precision)
    assert list(row.values()) == ["rowwise", "2 layers", "cublaslt", "cublaslt", "bf16"]
    assert "<td>2 layers</td>" in page_of_runs(runs).html()


def test_the_experts_of_the_last_sample_are_a_table(tmp_path):
    run = make_run(tmp_path / "run", steps=20)
    found = np.zeros(2, EXPERTS)
    found["step"], found["layer"], found["experts"], found["fullest"], found["idle"] = (10, 20), 2, 8, 5, 1
    found["load"], found["worst"], found["sqnr"] = (1, 2), (3, 0, 7), (27.125, np.nan, 30.0)
    (run / "watch" / "experts.bin").write_bytes(found.tobytes())
    runs = read_runs([run])
    (row,) = expert_rows(runs[0].watched)
    name = runs[0].watched.layers[2].name
    assert list(row.values()) == [name, "2.00x, expert 5", "1 of 8", "expert 3, 27.1 dB", "", "expert 7, 30.0 dB"]
    page = page_of_runs(runs).html()
    assert "<h2>Experts</h2>" in page
    assert "expert 3, 27.1 dB" in page
    (run / "watch" / "experts.bin").unlink()  # of an older version
    assert "<h2>Experts</h2>" not in page_of_runs(read_runs([run])).html()


def test_the_trainer_of_hugging_face(tmp_path):
    for step in (9, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        history = [{"step": step, "loss": 1.5, "grad_norm": 0.5, "epoch": 0.1}, {"step": step, "eval_loss": 1.75}]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (run,) = read_runs([tmp_path])
    assert run.last_step == 10
    last = {key: series.last for key, series in run.series.items()}
    assert last == {"loss": 1.5, "gradient_norm": 0.5, "evaluation_loss": 1.75}
    (tmp_path / "trainer_state.json").write_text("{}")
    with pytest.raises(ArtifactError, match="trainer_state.json must have a list log_history of objects"):
        read_runs([tmp_path])
