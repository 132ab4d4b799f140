"""octavo plan on the command line."""

import csv
import re

import pytest


def test_the_cheapest_runs_that_end_in_time(printed, tmp_path):
    table = tmp_path / "runs.csv"
    output = printed("plan", "llama-3-8b", "--tokens", "1T", "--days", 14, "--price", 3, "--csv", table)
    found = [line.split() for line in output.splitlines()[2:10]]
    assert [float(row[-1].replace(",", "")) for row in found] == sorted(float(r[-1].replace(",", "")) for r in found)
    assert {row[1] for row in found} == {"bf16", "rowwise"}
    assert all(float(row[6]) <= 14 for row in found)
    [first, *_] = rows = list(csv.DictReader(table.read_text().splitlines()))
    assert (first["gpus"], first["recipe"]) == (found[0][0], "rowwise")
    assert len(rows) == len(found)


def test_a_table_of_cases_replaces_its_own_kind_only(printed, refused, tmp_path):
    table, other = tmp_path / "plan.csv", tmp_path / "other.csv"
    other.write_text("mine")
    for _ in range(2):
        printed("plan", "gpt2", "--compare", "batch=1,2", "--csv", table)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["case"] for row in rows] == ["batch 1", "batch 2"]
    assert float(rows[0]["memory.peak"]) < float(rows[1]["memory.peak"])
    assert "exists, and is not a table that Octavo wrote" in refused("plan", "gpt2", "--csv", other)
    assert other.read_text() == "mine"


LLAMA = "llama-3.1-8b"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpt-5"], "MODEL must be a preset"),
        (["gpt2", "--tokens", "many"], "--tokens must be a number such as 300B"),
        (["gpt2", "--days", "14"], "--days is the time for --tokens: add it"),
        (["gpt2", "--days", "0", "--tokens", "1B"], "--days must be above 0; got 0"),
        (["gpt2", "--days", "1", "--tokens", "1B", "--gpus", "8"], "searches GPUs and recipes: leave out --gpus"),
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
        (["gpt2", "--gpu", "h300"], "--gpu must be one of .* got 'h300'; the nearest is h"),
        (["gpt2", "--gpus", "0"], "--gpus must be from 1 to 1,000,000, more than any machine has; got 0"),
        (["gpt2", "--gpus", "1000000000"], "--gpus must be from 1 to 1,000,000, .* got 1,000,000,000"),
        ([LLAMA, "--gpus", "3", "--parallel.tp", "3"], "tp must divide .*; got 3: it can be 1, 2, 4, 8"),
        ([LLAMA, "--gpus", "3", "--parallel.tp", "2"], "must multiply to the number of processes, 3"),
        (["gpt2", "--gpus", "2", "--batch", "3"], "must be a multiple of the 2 that .* have 3: give --batch 4"),
        (["gpt2", "--gpus", "2", "--optimizer.masters", "host"], "needs one process; got 2: give --gpus 1"),
        (["llama-1b", "--gpus", "16", "--batch", "8"], "multiple of the 16 .* settings have 8: give --batch 16"),
        (["gpt2", "--context", "4096"], "must be at most the 1024 tokens of gpt2; got 4096"),
        (["gpt2", "--gpu", "a100"], "A100 80GB SXM has no FP8 GEMMs, .* give --recipe bf16"),
        (["gpt2", "--recipe", "rowwize"], "unknown recipe"),
        (["gpt2", "--layers", "2"], "gpt2 has sizes of its own: leave out --layers"),
        (["gpt2", "--no-tied"], "gpt2 has sizes of its own: leave out --tied"),
        (["dit-xl-2", "--context", "100"], "--context of the image model dit-xl-2 is 256; got 100"),
        (["gpt2", "--gpus", "16", "--network", "0"], "--network must be above 0"),
        ([LLAMA, "--serve", "--network", "100"], "--network belongs to training: leave out --serve, or --network"),
        (["llama-1b", "--tokenizer", "hf:some/tokenizer"], "how many tokens the tokenizer hf:"),
        (["lama-3-8b"], "got 'lama-3-8b': the nearest presets are llama-3-8b"),
        (["mixture"], 'give a .toml file with model = "mixture".*all presets: .*llama-1b'),
        *((["gpt2", "--compare", form], "--compare") for form in ("recipe", "=bf16", "recipe=", "gpus=many", "a=b,,c")),
        (["vit-h-14", "--serve"], "vit-h-14 has no vocabulary"),
        ([LLAMA, "--serve", "--gpus", "3"], "--gpus must divide the 32 heads"),
        ([LLAMA, "--serve", "--gpus", "0"], "must be at least 1"),
        (["llama-3-8b", "--serve", "--context", "9000"], "must be at most the 8192 tokens"),
        (["deepseek-v3", "--serve", "--gpus", "8", "--scheme", "block"], "cannot pack: .*no multiple of 128 x 128"),
        ([LLAMA, "--serve", "--scheme", "int8", "--gpu", "mi300x"], "no kernel for the scheme int8"),
        (["mixtral-8x7b", "--serve", "--scheme", "int8"], "can be packed in FP8, not int8"),
        (["gpt2", "--contxt", "128"], "did you mean 'context'"),
        ([""], "MODEL must name a model, such as llama-3-8b; got an empty word"),
        (["7B", "--compare", "gpus=1,2"], "--compare needs a model: a number of parameters has one table"),
        (["0B"], "a number of parameters or tokens must be at least 1; got 0B"),
        (["7B", "--recipe", "bf16"], "--recipe needs a model: a number of parameters has one table"),
    ],
)
def test_bad_input_is_one_message(refused, words, message):
    assert re.search(message, refused("plan", *words))
