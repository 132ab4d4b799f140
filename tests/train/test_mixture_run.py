"""A small mixture, trained in BF16 and in FP8: the losses fall alike, runs continue, and routers stay even."""

import json

import pytest
import torch
from metrics import sqnr

import octavo
from octavo.packing import pack
from octavo.train.config import ConfigError
from octavo.train.instrument import precision_of

MIXTURE = {"model": "mixture", "mlp_width": 48, "steps": 24, "experts": {"count": 4, "top_k": 2, "balance": 0.01}}


def losses(trainer):
    trainer.run()
    lines = (trainer.run_folder.path / "metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def test_bf16_and_fp8_learn_alike(begin, tmp_path):
    runs = {
        recipe: losses(begin(**MIXTURE, recipe=recipe, out=str(tmp_path / recipe))) for recipe in ("bf16", "rowwise")
    }
    assert runs["bf16"] != runs["rowwise"]
    for found in runs.values():
        assert found[-1] < found[0] - 1.5
    assert runs["rowwise"][-1] == pytest.approx(runs["bf16"][-1], abs=0.1)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_checkpointing": {"mode": "full"}},
        {"loss": {"logits": "chunked", "chunk": 16}},
        {"accumulate": 2, "batch": 1},
        pytest.param({"compile": {"blocks": True, "backend": "aot_eager"}}, marks=pytest.mark.slow),
    ],
    ids=["checkpointing", "chunks", "accumulation", "compiled"],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by Dynamo, which hides it
def test_settings_that_compute_the_same(begin, tmp_path, changes):
    few = MIXTURE | {"steps": 4}
    expected = losses(begin(**few, out=str(tmp_path / "plain")))
    assert losses(begin(**few, **changes, out=str(tmp_path / "other"))) == pytest.approx(expected, abs=0.02)


def test_the_loss_that_spreads_tokens_has_a_gradient_and_no_value(begin, tmp_path):
    few = MIXTURE | {"steps": 3}
    one, other = (
        losses(begin(**(few | {"experts": {"balance": factor}}), out=str(tmp_path / str(factor))))
        for factor in (0.0, 1.0)
    )
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_a_run_continues_with_the_same_bits(begin, go_on, tmp_path):
    few = MIXTURE | {"steps": 8}
    whole = begin(**few, out=str(tmp_path / "whole"))
    whole.run()
    half = begin(**(few | {"steps": 4, "decay_steps": 8}), out=str(tmp_path / "half"))
    half.run()
    rest = go_on(tmp_path / "half", "--steps", "8")
    rest.run()
    for one, two in zip(whole.state.model.parameters(), rest.state.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_record_of_a_run_counts_experts_among_fp8(begin):
    trainer = begin(**(MIXTURE | {"steps": 3}))
    found = precision_of(trainer.state.model, torch.device("cpu"))
    assert found["fp8_share"] > 0.5
    assert not [name for name in found["high_precision"] if "experts." in name]


@pytest.mark.parametrize("shared", [0, 32])
@pytest.mark.filterwarnings("ignore:.* is an expert in FP8")
def test_a_run_is_packed_and_opened(begin, tmp_path, shared):
    trainer = begin(**(MIXTURE | {"experts": {"count": 4, "shared_width": shared}}))
    trainer.run()
    report = pack(trainer.run_folder.path, tmp_path / "packed", experts=True)
    assert sum(".experts." in name for name in report.packed) == 2 * 4 * 3
    model = octavo.load(tmp_path / "packed")
    ids = torch.randint(256, (1, 12))
    with torch.no_grad():
        exact, found = trainer.state.model.eval()(ids), model(ids).logits
    assert sqnr(exact, found) > 15
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, 16)


def test_more_experts_a_token_than_there_are_is_an_error(settings):
    with pytest.raises(ConfigError, match="must be at most experts.count; got experts.top_k 9 and experts.count 8"):
        settings(model="mixture", experts={"top_k": 9})
