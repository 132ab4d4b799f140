"""octavo calibrate, as it is typed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.calibration.folder import Calibration
from octavo.models.tokenizer import ByteTokenizer

OPTIONS = ("--samples", 30, "--context", 24, "--batch", 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A deep tiny Llama, one channel of whose first block is far larger than the others."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=12, initializer_range=0.2, **sizes, **ends))
    with torch.no_grad():
        llama.model.layers[0].input_layernorm.weight[5] = 200
    folder = tmp_path_factory.mktemp("models") / "tiny"
    llama.save_pretrained(folder)
    ByteTokenizer().save(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "book.txt"
    path.write_text("It was a bright cold day in April, and the clocks were striking. " * 40)
    return path


def test_calibrate(octavo, model, data, tmp_path):
    code, out, err = octavo("calibrate", model, tmp_path / "out", "--data", data, *OPTIONS)
    assert (code, err) == (0, "")
    found = Calibration.load(tmp_path / "out")
    assert found.prompts == 30
    assert f"30 prompts, 720 tokens, {len(found.sites)} sites" in out
    lines = out[out.index("the 10 sites with the largest outliers") :].splitlines()
    assert lines[1].split() == ["site", "amax", "99.99%", "ratio", "outlier", "channels"]
    rows = [line.split() for line in lines[2:] if line.strip()]
    ratios = [statistics.amax / statistics.percentile(99.99) for statistics in found.sites.values()]
    assert [float(row[3]) for row in rows] == pytest.approx(sorted(ratios, reverse=True)[:10], abs=0.006)
    assert all(found.sites[row[0]].amax == pytest.approx(float(row[1]), rel=1e-3) for row in rows)
    assert found.sites["model.layers.0.self_attn.q_proj.input"].outlier_channels().tolist() == [5]


def test_it_says_what_it_skipped(octavo, model, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("Folded three times. " * 40)
    (texts / "latin.txt").write_bytes(b"pli\xe9 " * 40)
    code, out, _ = octavo("calibrate", model, tmp_path / "out", "--data", texts, "--samples", 2, "--context", 8)
    assert code == 0
    assert out.splitlines()[:2] == [
        "read 1 file (800 bytes); skipped 1: 1 not UTF-8 (latin.txt)",
        "warning: 20% of the bytes were skipped (200 bytes): convert the files that are not UTF-8",
    ]
    data = Calibration.load(tmp_path / "out").settings["data"]
    assert data["skipped"] == {"not UTF-8": {"count": 1, "bytes": 200, "examples": ["latin.txt"]}}


def test_it_says_when_there_are_fewer_prompts(octavo, model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": text}) for text in ("one", "three", "one")))
    code, out, _ = octavo("calibrate", model, tmp_path / "out", "--data", rows, *OPTIONS)
    assert code == 0
    assert "2 prompts (30 asked for, the data has no more), 8 tokens" in out


def test_errors_are_one_line(octavo, model, data, tmp_path):
    rows = tmp_path / "bad.jsonl"
    rows.write_text('{"text": "fine"}\nnot json\n')
    for words, message in (
        (("--data", rows), "bad.jsonl, line 2: not valid JSON"),
        (("--data", tmp_path / "no"), "there is no such file"),
        (("--data", data, "--samples", 0), "samples, context and batch must be at least 1"),
        ((), "Missing option '--data'"),
    ):
        code, out, err = octavo("calibrate", model, tmp_path / "out", *words)
        assert code in (1, 2)
        assert message in err
        assert "Traceback" not in out + err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_an_interrupt_says_how_to_continue(octavo, model, data, tmp_path, monkeypatch):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.calibration.calibrate", interrupt)
    code, _, err = octavo("calibrate", model, tmp_path / "out", "--data", data)
    assert (code, err) == (
        130,
        f"interrupted: the blocks that were done are kept beside {tmp_path / 'out'}; the same command continues\n",
    )


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on(octavo, model, data, tmp_path):
    """SIGKILL, at a moment that nobody chose."""
    options = ("--samples", 12, "--context", 24, "--batch", 1)  # batches of one: there is time to be killed in
    words = ["calibrate", model, tmp_path / "killed", "--data", data, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "octavo", *map(str, words)], env=environment)
    work: Path = tmp_path / ".killed.calibrating"
    while process.poll() is None and not (work / "part-003.safetensors").is_file():
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    done = len(list(work.glob("part-*.safetensors")))
    assert 4 <= done < 14
    first = (work / "part-000.safetensors").stat().st_mtime_ns
    assert octavo(*words)[0] == 0
    assert octavo("calibrate", model, tmp_path / "whole", "--data", data, *options)[0] == 0
    assert first < (tmp_path / "killed" / "calibration.json").stat().st_mtime_ns
    one, other = (Calibration.load(tmp_path / name) for name in ("killed", "whole"))
    for site, statistics in one.sites.items():
        for leaf, tensor in statistics.to_tensors().items():
            assert torch.equal(tensor, other.sites[site].to_tensors()[leaf])
    assert not work.exists()
