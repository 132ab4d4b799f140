"""octavo pack --budget, as it is typed."""

import json
import re

import pytest
from calibration_examples import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("It was a bright cold day in April. " * 20)
    return path


def test_budget(octavo, model, data, tmp_path):
    options = ("--data", data, "--samples", 6, "--context", 24)
    code, out, err = octavo("pack", model, tmp_path / "all", "--budget", "kl=9", *options)
    assert (code, err) == (0, "")
    record = json.loads((tmp_path / "all" / "octavo.json").read_text())["budget"]
    assert "asked for kl=9, measured kl=" in out
    assert record["kept_in_bf16"] == []
    assert "read 1 file (700 bytes)" in out.splitlines()
    assert (record["data"]["read"]["files"], record["data"]["read"]["skipped"]) == (1, {})
    limit = record["limits"][0]["measured"] / 3
    code, out, err = octavo("pack", model, tmp_path / "out", "--budget", f"kl={limit}", *options)
    assert (code, err) == (0, "")
    record = json.loads((tmp_path / "out" / "octavo.json").read_text())["budget"]
    rows = [line.split() for line in out.splitlines() if line.startswith("model.layers")]
    kept = [row[0] for row in rows if row[-1] == "BF16"]
    assert len(kept) == len(record["kept_in_bf16"]) > 0
    assert [row[0] for row in rows[: len(kept)]] == kept
    assert f"measured kl={record['limits'][0]['measured']:.4g}" in out
    assert f"{record['data']['tokens']} tokens of 6 prompts" in out
    layers = sum(len(group) for group in record["kept_in_bf16"])
    assert re.search(rf"left in BF16 +{layers} by the budget, in the table below", out)
    assert "skip=" not in out


def test_errors_are_one_line(refused, model, data, tmp_path):
    for words, message in (
        (("--budget", "much"), "a budget reads kl=0.01"),
        (("--budget", "kl=1"), "give --data"),
        (("--budget", "kl=0"), "the budget kl must be nats a token above 0"),
        (("--budget", "kl=1e-9", "--data", data, "--samples", 2, "--context", 16), "leaves nothing to pack"),
    ):
        assert message in refused("pack", model, tmp_path / "out", *words)
    assert [path.name for path in tmp_path.iterdir()] == ["data.txt"]
