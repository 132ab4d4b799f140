"""octavo plan on the command line."""

import json

import pytest
from typer.testing import CliRunner

from octavo_cli import plan
from octavo_cli.app import app
from octavo_cli.choices import SCHEMES


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["plan", *words])
    assert result.exit_code == 0, result.output or result.exception
    return result.stdout


def figures(output: str) -> dict[str, list[str]]:
    """The rows of a plan by name, as the words after the name."""
    rows = [line.split("  ") for line in output.splitlines() if "  " in line]
    return {row[0].strip(): [word.strip() for word in row[1:] if word.strip()] for row in rows}


def test_a_training_run():
    rows = figures(run("llama-3-8b", "--gpus", "8", "--tokens", "1T", "--price", "2"))
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
    assert "matrix products: measured" in output
    assert "H100 data sheet" in output


def test_a_model_that_does_not_fit_gets_advice():
    output = run("llama-3-70b", "--gpu", "rtx4090")
    assert figures(output)["fits"] == ["NO"]
    assert "--activation-checkpointing.mode full" in output
    assert "data sheet" in output


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
    assert result.exit_code == 2
    assert "Did you mean --context?" in result.output


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00"), (12.345, "12.35"), (0.9957, "1.00"), (0.5, "0.50"), (0.085, "0.085")],
)
def test_small_figures_keep_two_digits(value, text):
    assert plan._digits(value, 2) == text
