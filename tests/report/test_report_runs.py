"""Reading runs: whole ones, half-written ones, and those of other trainers; and the page of runs."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from report_examples import make_run, watched_of, write_metrics

from octavo.checkpoint.files import ArtifactError
from octavo.report import training_page as pages
from octavo.report.page import Line, LineChart, Page, place, table
from octavo.train.run_records import RunData, read_runs, read_series
from octavo.watching.storage import EXPERTS, Event, GemmRun


def test_a_run_of_octavo_train(tmp_path):
    (run,) = read_runs([make_run(tmp_path / "run")])
    assert run.name == "run"
    assert run.last_step == 200
    assert run.settings["recipe"] == "rowwise"
    assert list(run.series["loss"]) == list(range(1, 201))
    assert list(run.series["evaluation_loss"]) == list(range(10, 201, 10))
    assert len(run.watched.layers) == 13
    assert run.remarks == []
    facts = pages.run_facts(run)
    assert facts["GEMMs"] == "36 fp8, 3 bf16"
    assert facts["layers watched"] == "13, every 10 steps"
    assert facts["events"] == "1"


def test_the_terminal_has_the_first_of_each_kind_of_many_events(tmp_path, printed):
    events = make_run(tmp_path) / "watch" / "events.jsonl"
    line = json.loads(events.read_text())
    later = [line | {"step": 201 + n, "rule": ("underflow", "loss_stall")[n % 2]} for n in range(9)]
    events.write_text("".join(json.dumps(each) + "\n" for each in (line, *later)))
    text = printed("report", tmp_path).partition("the first of each kind of 10 events:")[2]
    found = re.findall(r"^step (\d+): (\w+)", text, re.MULTILINE)
    assert found == [(str(line["step"]), line["rule"]), ("201", "underflow"), ("202", "loss_stall")]


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
    assert len(run.series["loss"]) == 200
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
    assert (run.numbers("loss"), run.wrong_steps("loss"), run.last_number("loss")) == ({1: 2.0}, [2, 3], None)
    assert (run.numbers("gradient_norm"), run.last_number("gradient_norm")) == ({}, None)
    assert "loss is inf or NaN at step 2, and 1 more." in run.remarks
    facts = pages.run_facts(run)
    assert facts["inf or NaN"] == "3 values"
    assert facts["loss"] == "inf or NaN at step 3, 2.0000 at step 1"
    summary = pages.to_dict(run)["series"]["loss"]
    assert (summary["last"], summary["last_number"]) == (None, 2.0)


def test_events_from_which_the_run_went_back_count_apart(tmp_path):
    make_run(tmp_path)
    path = tmp_path / "watch" / "events.jsonl"
    (line,) = path.read_text().splitlines()
    path.write_text(line + "\n" + json.dumps(json.loads(line) | {"undone": True}) + "\n")
    runs = read_runs([tmp_path])
    assert pages.run_facts(runs[0])["events"] == "1, and 1 of steps from which the run went back"
    page = pages.page_of_runs(runs)
    assert page.html().count("<td>undone</td>") == 1
    assert len(page.charts[0].marks) == 1


def test_a_step_that_came_twice_counts_once():
    series = read_series([{"step": 2, "loss": 1}, {"step": 1, "loss": 3}, {"step": 2, "loss": 2}], "run")["loss"]
    assert list(series.items()) == [(1, 3.0), (2, 2.0)]


def test_a_run_that_was_not_watched_shows_its_recipes(tmp_path):
    recipes = {"rowwise": {"y": "cublaslt", "dx": "cublaslt", "dw": "bf16", "layers": ["a", "b"]}}
    write_metrics(tmp_path, 2, precision={"recipes": recipes})
    runs = read_runs([tmp_path])
    (row,) = pages.recipe_rows(runs[0].precision)
    assert list(row.values()) == ["rowwise", "2 layers", "cublaslt", "cublaslt", "bf16"]
    assert "<td>2 layers</td>" in pages.page_of_runs(runs).html()


def test_the_experts_of_the_last_sample_are_a_table(tmp_path):
    run = make_run(tmp_path / "run", steps=20)
    found = np.zeros(2, EXPERTS)
    found["step"], found["layer"], found["experts"], found["fullest"], found["idle"] = (10, 20), 2, 8, 5, 1
    found["load"], found["worst"], found["sqnr"] = (1, 2), (3, 0, 7), (27.125, np.nan, 30.0)
    (run / "watch" / "experts.bin").write_bytes(found.tobytes())
    runs = read_runs([run])
    (row,) = pages.expert_rows(runs[0].watched)
    name = runs[0].watched.layers[2].name
    assert list(row.values()) == [name, "2.00x, expert 5", "1 of 8", "expert 3, 27.1 dB", "", "expert 7, 30.0 dB"]
    page = pages.page_of_runs(runs).html()
    assert "<h2>Experts</h2>" in page
    assert "expert 3, 27.1 dB" in page
    (run / "watch" / "experts.bin").unlink()  # of an older version
    assert "<h2>Experts</h2>" not in pages.page_of_runs(read_runs([run])).html()


def test_the_trainer_of_hugging_face(tmp_path):
    for step in (9, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        history = [{"step": step, "loss": 1.5, "grad_norm": 0.5, "epoch": 0.1}, {"step": step, "eval_loss": 1.75}]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (run,) = read_runs([tmp_path])
    assert run.last_step == 10
    last = {key: run.last_number(key) for key in run.series}
    assert last == {"loss": 1.5, "gradient_norm": 0.5, "evaluation_loss": 1.75}
    (tmp_path / "trainer_state.json").write_text("{}")
    with pytest.raises(ArtifactError, match="trainer_state.json must have a list log_history of objects"):
        read_runs([tmp_path])


# ---- The page: long lines, many events, what several runs share; and what a page may load and what it escapes


def data_of(html: str):
    (text,) = re.findall('<script type="application/json" id="data">(.*?)</script>', html, re.S)
    return json.loads(text)


def test_a_long_line_keeps_its_extremes_and_gaps() -> None:
    values = np.sin(np.arange(100_000.0))
    values[12_345], values[70_001], values[50_000] = 99.0, -99.0, np.nan
    steps, thinned = pages.thin(dict(enumerate(values.tolist())))
    assert len(steps) == len(thinned) <= 4000
    assert steps == sorted(set(steps))
    assert [thinned[steps.index(step)] for step in (12_345, 70_001, 50_000)] == [99.0, -99.0, None]
    assert pages.thin({1: 2e9, 5: np.nan}, 1e-9) == ([1, 5], [2.0, None])  # a short one


def test_the_lines_of_runs(tmp_path: Path) -> None:
    write_metrics(tmp_path / "a", 10)
    write_metrics(tmp_path / "b", 20, offset=1.0)
    page = pages.page_of_runs(read_runs([tmp_path / "a", tmp_path / "b"])).html()
    charts = {chart["id"]: chart for chart in data_of(page)["charts"]}
    loss = [(line["name"], line["colour"], line["dashed"], len(line["x"])) for line in charts["loss"]["lines"]]
    expected = [("a", 0, False, 10), ("a evaluation", 0, True, 1), ("b", 1, False, 20), ("b evaluation", 1, True, 2)]
    assert loss == expected
    assert charts["memory"]["lines"][0]["y"][0] == 41.0
    assert "<h2>Events" not in page
    assert 'id="heat"' not in page


def test_many_events_are_cut_and_counted(tmp_path: Path) -> None:
    watched = watched_of(4, np.arange(3))
    for step in range(1500):
        watched.events.append(Event(step, "loss_spike", None, None, 9.0, 1.0, f"<i>the loss of {step}", "rollback"))
    page = pages.page_of_runs([RunData(tmp_path, "run", {}, {}, watched=watched)]).html()
    assert "The last 1000 of 1500 events." in page
    assert page.count("&lt;i&gt;the loss of") == 1000 + 1  # and the first of its kind
    assert "<i>" not in page


def test_events_come_first_with_a_row_for_each_kind(tmp_path: Path) -> None:
    found = [("underflow", "dy", 10 * n, f"layer {n % 2}") for n in range(1, 6)] + [("saturation", "x", 7, "layer 3")]
    watched = watched_of(4, np.arange(3))
    for rule, operand, step, layer in found:
        watched.events.append(Event(step, rule, layer, operand, 9.0, 1.0, "why", None))
    page = pages.page_of_runs([RunData(tmp_path, "run", {}, {}, watched=watched)]).html()
    rows = re.findall(r"<tr><td>(.*?)</td></tr>", page.split("<h2>Events</h2>")[1].split("</table>")[0])
    assert [row.split("</td><td>") for row in rows] == [
        ["underflow", "dy", "5", "2 layers", "10", "50", "why"],
        ["saturation", "x", "1", "layer 3", "7", "7", "why"],
    ]
    assert page.index("<h2>Events</h2>") < page.index("<h2>Layers over") < page.index("<h2>Every event</h2>")
    assert "the watch recorded 6 events: 5 underflow, 1 saturation." in page


@pytest.mark.parametrize(
    ("losses", "events", "said", "good"),
    [
        ([2.0, 1.5], 0, "step 2 of 9 with a loss of 1.5000, and the watch found nothing.", True),
        ([2.0, np.nan], 0, "The loss is inf or NaN at step 2.", False),
        ([2.0, 1.5], 1, "and the watch recorded 1 event: 1 underflow.", False),
        ([2.0, 1.5], None, "its layers were not watched.", True),
    ],
)
def test_the_verdict_of_a_run(losses, events, said, good, tmp_path: Path) -> None:
    watched = None if events is None else watched_of(4, np.arange(0))
    for step in range(events or 0):
        watched.events.append(Event(step, "underflow", None, "dy", 9.0, 1.0, "why", None))
    series = {"loss": dict(enumerate(losses, 1))}
    text, fine = pages.verdict(RunData(tmp_path, "run", {"steps": 9}, series, watched=watched))
    assert said in text
    assert fine == good


def test_inf_and_nan_that_no_rule_has_judged_are_in_the_verdict(tmp_path: Path) -> None:
    watched = watched_of(4, np.arange(3))
    watched.operands["nonfinite"][[3, 4, 9]] = 0.5  # of layers 1 and 3
    text, fine = pages.verdict(RunData(tmp_path, "run", {}, {}, watched=watched))
    assert (text, fine) == ("The run is at step 2, and 2 watched layers had inf or NaN.", False)


def test_what_a_run_is_stands_at_the_top(tmp_path: Path) -> None:
    record = {"command": "octavo train a.toml", "machine": "2 x NVIDIA H200", "versions": "octavo 0.1.0, torch 2.11"}
    write_metrics(tmp_path, 5)
    log = tmp_path / "metrics.jsonl"
    log.write_text(json.dumps({"step": 0, "started": record}) + "\n" + log.read_text())
    (tmp_path / "config.json").write_text(json.dumps({"data": ["book.txt"], "recipe": "rowwise"}))
    top = pages.page_of_runs(read_runs([tmp_path])).html().split("<h2>")[0]
    assert all(f"<td>{text}</td>" in top for text in ("book.txt", "rowwise", *record.values()))
    assert re.search(r"<td>written</td><td>20\d\d-\d\d-\d\d \d\d:\d\d UTC</td>", top)


def run_of(name: str, losses) -> RunData:
    return RunData(Path(name), name, {}, {"loss": dict(enumerate(map(float, losses), 1))})


def test_the_gap_has_a_band_of_the_noise_of_its_means() -> None:
    """Of 2 % more with an error of 1 % in each step: the band of a mean of 100 steps is 2 * 1 % / sqrt(100)."""
    random, losses = np.random.default_rng(0), np.linspace(4, 3, 1000)
    noisy = losses * (1.02 + 0.01 * random.normal(size=1000))
    noisy[500] = np.nan
    (gap,) = pages.gaps([run_of("a", losses), run_of("b", noisy)])
    assert gap.mean.mean() == pytest.approx(2, abs=0.05)
    assert gap.half.mean() == pytest.approx(0.2, rel=0.1)
    assert np.mean(np.abs(gap.mean - 2) < gap.half) > 0.8
    assert gap.steps[0] == 50
    chart = pages.page_of_runs([run_of("a", losses), run_of("b", noisy)]).charts[1]
    assert (chart.id, chart.bands, chart.zero) == ("gap", [(2, 1)], True)
    [(text, good)] = pages.gap_verdicts([run_of("a", losses), run_of("b", noisy)])
    assert re.match(r"b against a: loss \+[12]\.\d\d % \+- 0\.\d\d % at the end\. one seed: cannot tell", text)
    assert not good
    near = run_of("b", losses * (1 + 0.01 * random.normal(size=1000)))
    [(text, good)] = pages.gap_verdicts([run_of("a", losses), near])
    assert good
    assert "within the noise" in text
    assert pages.gaps([run_of("a", losses), run_of("b", losses[:5])]) == []


def test_a_reason_of_all_layers_is_said_once(tmp_path: Path) -> None:
    """What one layer alone has stays in its row; the head, in BF16, has a reason of its own."""
    emulated, fused = "cpu has no FP8 GEMM: slow", "cpu has no FP8 GEMM: slow; in model.layers.0.mlp"
    watched = watched_of(8, np.arange(3))
    for number, layer in enumerate(watched.layers[:-1]):
        gemms = {name: GemmRun("fp8", "emulated", fused if number == 4 else emulated) for name in ("y", "dx", "dw")}
        watched.layers[number] = replace(layer, gemms=gemms)
    page = pages.page_of_runs([RunData(tmp_path, "run", {}, {}, watched=watched)]).html()
    shown = page.split("What ran where</h2>")[1].split("<h2>")[0]
    assert shown.count("cpu has no FP8 GEMM: slow") == 1
    assert shown.count("in model.layers.0.mlp<") == 1
    assert shown.count("the layer is skipped") == 1


def test_runs_share_the_bytes_of_a_page(tmp_path: Path) -> None:
    run = RunData(tmp_path, "run", {}, {}, watched=watched_of(200, np.arange(300)))
    one, four = (pages.page_of_runs([run] * count).html() for count in (1, 4))
    assert len(four) < 20e6
    (single,), several = data_of(one)["watched"], data_of(four)["watched"]
    assert len(several) == 4
    assert len(single["columns"]) == 300
    assert len(several[0]["columns"]) < 300
    assert single["columns"][-1] == [299, 299]


def test_a_format_has_its_numbers_and_bf16_has_none(tmp_path: Path) -> None:
    data = data_of(pages.page_of_runs(read_runs([make_run(tmp_path / "run")])).html())
    assert data["formats"].keys() == {"e4m3", "e5m2"}
    assert data["formats"]["e4m3"][-1] == 448.0


# ---- The frame


# uPlot 1.6.32 as npm serves it: `npm pack uplot@1.6.32`, dist/ and LICENSE.
HASHES = {
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}


def example() -> Page:
    page = Page("a <b>title</b>")
    page.add_chart(LineChart("loss", "Loss", "step", "loss", [Line("</script><b>", [1, 2], [0.5, None])]))
    return page


def test_the_library_is_the_one_that_was_published_and_its_licence_is_in_the_page():
    assets = files("octavo.report") / "assets"
    assert {name: hashlib.sha256((assets / name).read_bytes()).hexdigest() for name in HASHES} == HASHES
    assert (assets / "uPlot.LICENSE").read_text() in example().html()


def test_the_policy_allows_exactly_what_the_page_holds():
    html = example().html()
    (policy,) = re.findall('http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    styles, scripts = re.findall("<style>(.*?)</style>", html, re.S), re.findall("<script>(.*?)</script>", html, re.S)
    hashed = [f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in (*styles, *scripts)]
    assert len(scripts) == 2
    assert [*rules["style-src"].split(), *rules["script-src"].split()] == hashed
    assert {rules[name] for name in ("default-src", "base-uri", "form-action")} == {"'none'"}
    assert "\r" not in html  # a browser reads it as another character, and the hash would not fit


def test_texts_cannot_leave_their_place():
    html = example().html()
    line = {"name": "</script><b>", "x": [1, 2], "y": [0.5, None], "colour": 0, "dashed": False}
    assert data_of(html)["charts"][0]["lines"][0] == line
    assert "<title>a &lt;b&gt;title&lt;/b&gt;</title>" in html
    assert "<script>alert" not in table(("a<",), [("<script>alert(1)</script>",)], places=[place("r", '"><i>', 3)])
    assert "<i>" not in table(("a",), [("b",)], title="<i>", remark="<i>", places=[place("r", '"><i>', 3)])


def test_a_page_without_charts_has_no_script():
    page = Page("empty")
    page.add(table(("a",), [("b",)]))
    assert "<script" not in page.html()
    assert "script-src 'none'" in page.html()
