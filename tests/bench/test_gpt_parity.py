"""bench/gpu/gpt_parity.py and its trainers, the model small and on the CPU."""

import json
import math
import statistics
from pathlib import Path

import pytest
import scipy.stats
import torch

from bench.gpu import gpt_parity, gpt_trainer
from bench.report import parity
from octavo.models.tokenizer import ByteTokenizer
from octavo.text import read_text
from octavo.train.data import build_corpus

CONFIG = gpt_trainer.CONFIG.change(
    layers=2, width=64, heads=4, context=32, vocabulary=256, batch=2, steps=12, warmup=2, evaluate_batches=2,
    compile=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def data() -> gpt_trainer.Data:
    reading = read_text([str(Path(__file__))])
    tokenizer = ByteTokenizer()
    return gpt_trainer.Data(build_corpus(reading.texts, tokenizer, 32, 0.2), tokenizer, reading.report)


def test_every_mode_starts_from_the_same_weights_and_batches(data: gpt_trainer.Data) -> None:
    trainers = {mode: gpt_trainer.make_trainer(mode, CONFIG, data)[0] for mode in ("bf16", "rowwise")}
    for seed in (0, 1):
        for trainer in trainers.values():
            trainer.step()
            gpt_trainer.restart(trainer, data, seed)
        bf16, fp8 = trainers.values()
        for (name, p), (other, q) in zip(bf16.model.named_parameters(), fp8.model.named_parameters(), strict=True):
            assert name == other
            assert torch.equal(p, q)
        assert torch.equal(bf16.data.training.at(3)[0], fp8.data.training.at(3)[0])
        assert bf16.state.step == 0
        moments = [tensor for state in bf16.state.optimizer.state.values() for tensor in state.values()]
        assert not any(tensor.count_nonzero() for tensor in moments)


def test_gradients_in_fp8_are_off_by_what_fp8_costs(data: gpt_trainer.Data, monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = {mode: gpt_trainer.make_trainer(mode, CONFIG, data) for mode in ("bf16", "rowwise")}
    errors = gpt_trainer.gradient_errors(trainers, data)
    assert 0.02 < errors["rowwise"] < 0.3
    monkeypatch.setattr(gpt_trainer, "GRADIENT_ERRORS", (0.9, 1.0))
    with pytest.raises(RuntimeError, match="must be off by"):
        gpt_trainer.gradient_errors(trainers, data)


def test_runs_are_written_one_by_one_and_merged(data: gpt_trainer.Data, tmp_path: Path) -> None:
    plan = [("bf16", 0), ("rowwise", 0), ("bf16", 1), ("rowwise", 1)]
    gpt_parity.train_all(plan[:2], CONFIG, data, tmp_path, math.inf)
    before = (tmp_path / "bf16-0.json").stat()
    gpt_parity.train_all(plan, CONFIG, data, tmp_path, math.inf)
    assert (tmp_path / "bf16-0.json").stat() == before
    result = gpt_parity.merge(tmp_path)
    assert [(run["mode"], run["seed"]) for run in result["runs"]] == sorted(plan)
    assert result["tokens"] == 12 * 2 * 2 * 32
    assert len(result["runs"][0]["curve"]) == 2
    assert result["runs"][0]["curve"][0] > result["runs"][0]["final"] > 3
    gap = result["gaps"]["rowwise"]
    low, high = scipy.stats.t.interval(0.95, 1, gap["mean"], statistics.stdev(gap["gaps"]) / math.sqrt(2))
    assert gap["interval"] == pytest.approx([low, high])
    assert 0 < max(map(abs, gap["gaps"])) < 0.05


def test_a_mixture_is_trained_and_described(data: gpt_trainer.Data, tmp_path: Path) -> None:
    config = gpt_trainer.MIXTURE.change(
        layers=1, width=32, heads=2, mlp_width=32, context=32, vocabulary=256, batch=2, steps=2, warmup=1,
        evaluate_batches=1, compile=False, emulate=True,
    )  # fmt: skip
    gpt_parity.train_all([(mode, seed) for seed in (0, 1) for mode in ("bf16", "rowwise")], config, data, tmp_path, 1e9)
    result = gpt_parity.merge(tmp_path)
    assert result["runs"][2]["mode"] == "rowwise"
    assert result["runs"][2]["converted"] == 4 + 2  # linear layers and stacks of experts
    text = parity.mixture_parity({"moe_parity": result})
    assert "8 experts of 32, of which each token runs through 2; 128 tokens in 2 steps" in text
    assert f"| 1 | {result['runs'][1]['final']:.4f} | {result['runs'][3]['final']:.4f} (" in text
    assert "Not measured yet" in parity.mixture_parity({})


def test_no_run_is_started_that_would_end_too_late(data: gpt_trainer.Data, tmp_path: Path) -> None:
    gpt_parity.train_all([("bf16", 0)], CONFIG, data, tmp_path, -1.0)
    assert list(tmp_path.iterdir()) == []


def test_runs_that_differ_in_more_than_mode_and_seed_are_not_merged(tmp_path: Path) -> None:
    run = {"mode": "bf16", "seed": 0, "final": 1.0, "settings": {"steps": 1}, "corpus": {"fingerprint": "a"}}
    for seed, settings in ((0, {"steps": 1}), (1, {"steps": 2})):
        (tmp_path / f"{seed}.json").write_text(json.dumps(run | {"seed": seed, "settings": settings}))
    with pytest.raises(ValueError, match="the same settings; bf16:1"):
        gpt_parity.merge(tmp_path)
    (tmp_path / "0.json").unlink()
    (tmp_path / "1.json").write_text(json.dumps(run | {"mode": "rowwise"}))
    with pytest.raises(ValueError, match="those of bf16 among them"):
        gpt_parity.merge(tmp_path)
