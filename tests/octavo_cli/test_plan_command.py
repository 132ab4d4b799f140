"""octavo plan on the command line."""

import csv
import json
import re

import pytest
from typer.testing import CliRunner

from octavo_cli import plan
from octavo_cli.app import app
from octavo_cli.command import SCHEMES


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["plan", *words])
    assert result.exit_code == 0, result.output or result.exception
    return result.stdout


def figures(output: str) -> dict[str, list[str]]:
    """The rows of a plan by name, as the words after the name."""
    rows = [line.split("  ") for line in output.splitlines() if "  " in line]
    return {row[0].strip(): [word.strip() for word in row[1:] if word.strip()] for row in rows}


def test_a_training_run():
    rows = figures(run("llama-3.1-8b", "--gpus", "8", "--tokens", "1e12", "--price", "2"))
    assert rows["parameters"] == ["8.03 B"]
    parts = [float(value[0]) for name, value in rows.items() if name.startswith("GB ") and name not in OTHER]
    assert sum(parts) == pytest.approx(float(rows["GB at the peak"][0]), abs=0.1)
    times = [float(value[0]) for name, value in rows.items() if name.startswith("ms ") and " of " not in name]
    assert sum(times) == pytest.approx(float(rows["ms of a step"][0]), abs=1)
    assert float(rows["days"][0]) > 0
    assert "cost" in rows


def test_a_tiny_model_has_times_and_sizes_that_are_not_zero(tmp_path):
    settings = tmp_path / "tiny.toml"
    settings.write_text('model = "llama"\nlayers = 2\nwidth = 64\nheads = 2\n')
    output = run(str(settings))
    assert "below 1,024 inputs or outputs is extrapolated" in " ".join(output.split())
    rows = figures(output)
    assert rows["parameters"] == ["0.00032 B"]
    assert 0 < float(rows["GB weights"][0]) < 0.01
    assert 0.1 < float(rows["ms linear layers"][0]) < 1 < float(rows["ms of the host"][0])
    assert rows["ms of a step"] == rows["ms of the host"]


def test_a_gpu_that_waits_for_the_host():
    """The case with little work says so, and what helps; the other does not wait."""
    words = ("llama-3.2-1b", "--gpus", "2", "--context", "2048", "--compare", "batch=4,64")
    output = run(*words)
    few, many = figures(output)["ms waiting for the host"]
    assert float(few) > 0 == float(many)
    text = " ".join(output.split())
    assert f"batch 4: the GPU waits for the host: {few} ms of a step. Tokens/s with other settings: --batch 8 (" in text
    assert "batch 64: the GPU waits" not in text
    waiting, busy = json.loads(run(*words, "--json"))
    assert waiting["host_seconds"] == busy["host_seconds"] == pytest.approx(waiting["seconds"]["total"])
    assert waiting["seconds"]["waiting"] > 0 == busy["seconds"]["waiting"]
    assert waiting["faster_settings"]["--batch 8"] > 1.02
    assert busy["faster_settings"] == {}


def test_the_presets_of_training_have_a_plan():
    output = run("llama-1b")
    assert figures(output)["parameters"] == ["1.24 B"]
    assert "extrapolated" not in output


OTHER = ("GB at the peak", "GB of the GPU", "GB in the CPU's memory")


def test_cases_side_by_side_with_the_origin_of_the_figures():
    output = run("gpt2", "--compare", "recipe=bf16,rowwise", "--batch", "8", "--gpu", "h100")
    assert figures(output)["recipe"] == ["bf16", "rowwise"]
    assert "matrix products: interpolated between measured layers" in output
    assert figures(output)["GPUs"] == ["1 NVIDIA H100 80GB SXM"]  # once, since it is equal
    assert "H100 data sheet" in output


def test_a_model_that_does_not_fit_gets_what_does_and_no_price():
    output = run("llama-3.1-8b", "--gpu", "h100", "--tokens", "1T", "--price", "2")
    rows = figures(output)
    assert rows["fits"] == ["NO"]
    assert not {"days", "cost", "MFU"} & rows.keys()
    assert rows["with"] == ["GB at the peak", "tokens/s a GPU", "days", "cost"]
    assert "--optimizer.offload" in rows
    assert "nor with three of these" in run("llama-3-405b", "--gpu", "rtx4090", "--recipe", "bf16")


def test_cases_are_no_wider_than_the_terminal(monkeypatch):
    words = ("gpt2", "--compare", "batch=1,2,4,8,16", "--compare", "recipe=bf16,rowwise")
    monkeypatch.setenv("COLUMNS", "1000")
    wide = run(*words)
    monkeypatch.setenv("COLUMNS", "100")
    narrow = run(*words)
    for text, fits in ((wide, False), (narrow, True)):
        longest = max(len(line) for line in text.splitlines() if line.startswith("ms "))
        assert (longest <= 100) == fits
        assert sum(line.startswith("parameters") for line in text.splitlines()) == 1
    numbers = [re.findall(r"[\d,]+", line) for line in narrow.splitlines() if line.startswith("tokens/s a GPU")]
    assert [n for row in numbers for n in row] == figures(wide)["tokens/s a GPU"]


def test_the_cheapest_runs_that_end_in_time(tmp_path):
    table = tmp_path / "runs.csv"
    output = run("llama-3-8b", "--tokens", "1T", "--days", "14", "--price", "3", "--csv", str(table))
    found = [line.split() for line in output.splitlines()[2:10]]
    assert [float(row[-1].replace(",", "")) for row in found] == sorted(float(r[-1].replace(",", "")) for r in found)
    assert {row[1] for row in found} == {"bf16", "rowwise"}
    assert all(float(row[6]) <= 14 for row in found)
    [first, *_] = rows = list(csv.DictReader(table.read_text().splitlines()))
    assert (first["gpus"], first["recipe"]) == (found[0][0], "rowwise")
    assert len(rows) == len(found)


def test_a_table_of_cases_replaces_its_own_kind_only(tmp_path):
    table, other = tmp_path / "plan.csv", tmp_path / "other.csv"
    other.write_text("mine")
    for _ in range(2):
        run("gpt2", "--compare", "batch=1,2", "--csv", str(table))
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["case"] for row in rows] == ["batch 1", "batch 2"]
    assert float(rows[0]["memory.peak"]) < float(rows[1]["memory.peak"])
    result = CliRunner().invoke(app, ["plan", "gpt2", "--csv", str(other)])
    assert "exists, and is not a table that Octavo wrote" in str(result.exception)
    assert other.read_text() == "mine"


def test_serving():
    rows = figures(run("llama-3-8b", "--serve", "--batch", "4", "--context", "4096", "--kv-cache", "fp8"))
    assert float(rows["GB weights"][0]) == pytest.approx(9.08, abs=0.02)
    assert rows["largest batch"]
    assert [row for row in rows if row in SCHEMES] == list(SCHEMES)
    assert rows["bf16"][1] == "16.06"
    assert rows["weight"][-1] == "yes"


def test_schemes_side_by_side_say_what_was_measured():
    output = run("llama-3-8b", "--serve", "--attention", "fp8", "--gpu", "l40s", "--compare", "scheme=bf16,weight")
    assert figures(output)["scheme"] == ["bf16", "weight"]
    assert "By packing scheme" not in output
    assert "weight: the speed over BF16 that Llama-3-8B's layers have on an H200" in output
    assert "not measured on NVIDIA L40S" in output
    assert "in BF16, since cuDNN has FP8 attention for Hopper and Blackwell" in output


def test_the_table_of_states():
    rows = figures(run("7B"))
    gpu = {name: row[-2] for name, row in rows.items() if "FP32" in name or "offloaded" in name}
    assert list(gpu.values()) == ["112.0", "140.0", "28.0"]
    assert json.loads(run("7B", "--json"))["AdamW in FP32"] == {"gpu": 112e9, "cpu": 0}


def test_json_has_every_case():
    found = json.loads(run("gpt2", "--compare", "batch=1,2", "--json"))
    assert [case["case"] for case in found] == ["batch 1", "batch 2"]
    parts = found[0]["memory"]
    peak = sum(size for name, size in parts.items() if name not in ("peak", "offloaded", "moment"))
    assert parts["peak"] == pytest.approx(peak)
    [served] = json.loads(run("gpt2", "--serve", "--json"))
    assert served["decode_tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt-5"], "MODEL must be a preset"),
        (["gpt2", "--tokens", "many"], "--tokens must be a number such as 300B"),
        (["gpt2", "--days", "14"], "--days is the time for --tokens: add it"),
        (["gpt2", "--days", "0", "--tokens", "1B"], "--days must be above 0; got 0"),
        (
            ["gpt2", "--days", "1", "--tokens", "1B", "--gpus", "8"],
            "searches GPUs and recipes: leave out --gpus",
        ),
        (["gpt2", "--serve", "--kv-cache", "int4"], "--kv-cache must be one of bf16, fp8"),
        (["gpt2", "--gpu", "tpu"], "--gpu must be one of"),
        (["gpt2", "--tokens", "1B", "--price", "-1"], "--price must be 0 or more; got -1"),
        (["gpt2", "--price", "2"], "--price gives the cost of --tokens: add it, such as --tokens 1T"),
        (["gpt2", "--serve", "--tokens", "1B"], "--tokens belongs to training: leave out --serve"),
        (["gpt2", "--kv-cache", "fp8"], "--kv-cache belongs to serving: add --serve"),
        (["gpt2", "--scheme", "int8"], "--scheme belongs to serving: add --serve"),
        (["gpt2", "--attention", "fp8"], "--attention belongs to serving: add --serve"),
        (["gpt2", "--compare", "kv-cache=bf16,fp8"], "--kv-cache belongs to serving: add --serve"),
        (["gpt2", "--serve", "--compare", "kv-cache=bf16,int4"], "--kv-cache must be one of bf16, fp8; got 'int4'"),
        (["gpt2", "--serve", "--attention", "int8"], "--attention must be one of bf16, fp8"),
        (["gpt2", "--serve", "--scheme", "int4"], "--scheme must be one of bf16, channel"),
        ([""], "MODEL must name a model, such as llama-3-8b; got an empty word"),
        (["7B", "--compare", "gpus=1,2"], "--compare needs a model: a number of parameters has one table"),
        (["7B", "--serve"], "--serve needs a model: a number of parameters has one table"),
        (["7B", "--gpu", "h100"], "--gpu needs a model: a number of parameters has one table"),
        (["7B", "--recipe", "bf16"], "--recipe needs a model: a number of parameters has one table"),
    ],
)
def test_bad_input_is_one_message(words, message):
    result = CliRunner().invoke(app, ["plan", *words])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


def test_an_unknown_setting_gets_the_nearest():
    result = CliRunner().invoke(app, ["plan", "gpt2", "--contxt", "128"])
    assert result.exit_code == 1
    assert "did you mean 'context'?" in str(result.exception)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00"), (12.345, "12.35"), (0.9957, "1.00"), (0.5, "0.50"), (0.085, "0.085")],
)
def test_small_figures_keep_two_digits(value, text):
    assert plan._digits(value, 2) == text
