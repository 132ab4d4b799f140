"""Runs whose attention is in E4M3: the loss falls as in BF16, and other settings compute the same."""

from pathlib import Path

import pytest
import torch

from octavo.nn.quantized_attention import GradientScales
from octavo.train.config import Config, ConfigError
from octavo.train.model import convert_model, make_model

FP8 = {"attention": {"precision": "fp8", "shortest": 32}}


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_the_loss_falls_as_in_bf16(begin, records, tmp_path, model):
    found = {}
    for name, table in (("bf16", {}), ("fp8", FP8)):
        trainer = begin(**table, model=model, steps=24, recipe="bf16", out=str(tmp_path / name))
        trainer.run()
        found[name] = list(records(tmp_path / name).values())
        scales = [m.amax for m in trainer.model.modules() if isinstance(m, GradientScales)]
        assert len(scales) == (2 if name == "fp8" else 0)
        assert all((amax > 0).all() for amax in scales)
    assert found["bf16"] != found["fp8"]
    assert found["fp8"][-1] == pytest.approx(found["bf16"][-1], abs=0.1)
    assert found["fp8"][-1] < found["fp8"][0] - 1


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_computes_the_same(begin, records, tmp_path, mode):
    found = []
    for name, table in (("plain", {}), (mode, {"activation_checkpointing": {"mode": mode}})):
        begin(**FP8, **table, steps=4, watch={"interval": 0}, out=str(tmp_path / name)).run()
        found.append(list(records(tmp_path / name).values()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention": {"precision": "fp8"}}, "lower attention.shortest"),
        ({**FP8, "dropout": 0.1}, "attention.precision = fp8 has no dropout, and dropout is 0.1"),
    ],
)
def test_a_run_in_which_no_sequence_would_attend_in_fp8_is_refused(begin, changes, words):
    with pytest.raises(ConfigError) as raised:
        begin(**changes)
    assert words in str(raised.value)


def test_a_precision_that_is_not_one():
    with pytest.raises(ConfigError, match=r"attention\.precision must be one of bf16, fp8; got 'int8'"):
        Config.from_dict({"attention": {"precision": "int8"}})


def test_a_context_that_cudnn_does_not_take_is_refused_on_a_gpu(settings):
    config = settings(**FP8, context=200)
    model = make_model(config, 256, Path())
    with pytest.raises(ConfigError, match="a multiple of 128 on a GPU, got 200"):
        convert_model(model, config.change(recipe="bf16"), torch.device("cuda"))
