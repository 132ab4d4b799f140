"""Masters, moments and AdamW on the host: the bits of a run without it, on a device that is the CPU too."""

import weakref

import numpy as np
import pytest
import torch
from torch import nn

from octavo.nn.linear import Linear
from octavo.nn.parallel_weights import GatheredWeight
from octavo.nn.selection import promote
from octavo.train import host_masters
from octavo.train.processes import collect_between_steps
from octavo.watching.storage import read_watch

HOST = {"optimizer": {"masters": "host"}}
RUNS = [
    pytest.param({"recipe": "bf16"}, marks=pytest.mark.slow),
    {"recipe": "rowwise", "watch": {"interval": 3}},
    pytest.param({"recipe": "tensorwise", "tied": False, "log_every": 4}, marks=pytest.mark.slow),
    {"recipe": "delayed", "clip": 0.0, "accumulate": 2, "loss": {"logits": "chunked"}, "sample": 4},
    {"recipe": "rowwise", "precision": "fp32", "model": "gpt2", "dropout": 0.1},
    pytest.param({"recipe": "rowwise", "model": "mixture", "experts": {"count": 2}}, marks=pytest.mark.slow),
    pytest.param({"compile": {"blocks": True, "backend": "aot_eager"}, "log_every": 4}, marks=pytest.mark.slow),
    pytest.param({"recipe": "mxfp8", "activation_checkpointing": {"mode": "full"}}, marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def _slow_copies(monkeypatch):
    """Gradients are taken as on their way until somebody waits, as those of a GPU are."""
    monkeypatch.setattr(torch.cpu.Event, "query", lambda event: False)


@pytest.mark.parametrize("chosen", RUNS, ids=lambda run: "-".join(map(str, run.values())))
def test_a_run_has_the_bits_of_one_without_it_and_goes_on_with_or_without(begin, go_on, records, tmp_path, chosen):
    begin(out=str(tmp_path / "plain"), **chosen).run()
    begin(out=str(tmp_path / "host"), steps=4, decay_steps=8, **chosen, **HOST).run()
    go_on(tmp_path / "host", "--steps", "6", "--save-every", "6").run()
    go_on(tmp_path / "host", "--steps", "8", "--optimizer.masters", "device").run()
    for key in ("loss", "evaluation_loss", "gradient_norm", "sample"):
        expected = records(tmp_path / "plain", key)
        found = records(tmp_path / "host", key)
        assert {step: found[step] for step in expected} == expected, key
    plain, host = (read_watch(tmp_path / name).layer_records for name in ("plain", "host"))
    expected = plain[plain["step"] <= 6]
    found = host[np.isin(host["step"], expected["step"])]  # a run that goes on has a sample at its start too
    for name in expected.dtype.names:
        np.testing.assert_array_equal(found[name], expected[name], name)


def test_the_device_holds_a_byte_of_each_weight_that_fp8_reads(begin, tmp_path):
    trainer = begin(recipe="rowwise", **HOST)
    layers = [m for m in trainer.model.modules() if isinstance(m, Linear)]
    assert {type(layer.weight) for layer in layers} == {nn.Parameter}
    with trainer.state.on_device():
        assert all(isinstance(layer.weight.data, GatheredWeight) for layer in layers)
        stacked = trainer.model.model.layers[0].qkv.weight_cache.gathered
        assert stacked.data.itemsize == 1
        q = layers[0].weight
        assert q.data_bytes.data_ptr() == stacked.data.data_ptr()  # one copy serves both
        assert trainer.model.lm_head.weight is trainer.model.model.embed_tokens.weight
        wide = [p for p in trainer.model.parameters() if not isinstance(p.data, GatheredWeight)]
        assert {p.dtype for p in wide} == {torch.float32}
    narrow = begin(recipe="bf16", out=str(tmp_path / "narrow"), **HOST)
    with narrow.state.on_device():
        matrices = [p for block in narrow.model.model.layers for p in block.parameters() if p.ndim == 2]
        assert {p.dtype for p in matrices} == {torch.bfloat16}


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_gradient_that_is_not_finite_changes_no_weight_of_its_layer(begin, clip):
    trainer = begin(clip=clip, recipe="rowwise", **HOST)
    layer = trainer.model.model.layers[0].mlp.down_proj
    layer.register_full_backward_pre_hook(lambda module, grads: (grads[0] * torch.inf,))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    _, norm = trainer.step()
    trainer.state.hosted.wait()
    assert not norm.isfinite()
    kept = [name for name, p in trainer.model.named_parameters() if torch.equal(p, before[name])]
    assert (len(kept) == len(before)) == bool(clip)
    assert "model.layers.0.mlp.down_proj.weight" in kept


def test_an_error_of_a_thread_ends_the_step(begin, monkeypatch):
    trainer = begin(recipe="rowwise", **HOST)
    monkeypatch.setattr(host_masters, "_update", lambda *args: 1 / 0)
    trainer.step()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            trainer.step()
    with pytest.raises(ZeroDivisionError):
        trainer.state.hosted.wait()


def test_outside_of_a_pass_the_masters_compute_and_are_not_cast(begin):
    """As a search of short runs casts weights: these bytes would stand in the place of those on the device."""
    trainer = begin(recipe="rowwise", **HOST)
    tokens, _ = trainer.validation.at(0)
    with trainer.state.cast_once():
        before = trainer.model(tokens)
        assert {m.weight_cache.q for m in trainer.model.modules() if isinstance(m, Linear)} == {None}
    trainer.evaluate()
    assert torch.equal(trainer.model(tokens), before)


def test_a_promoted_layer_leaves_no_second_copy_of_the_weights(begin):
    """In a run Python collects no cycles of references."""
    trainer = begin(recipe="rowwise", **HOST)
    with collect_between_steps():
        trainer.step()
        layer = trainer.model.model.layers[0].mlp.down_proj
        with trainer.state.on_device():
            before = [weakref.ref(weight.held) for weight in trainer.state.hosted._weights]
        promote(layer, "bf16")
        trainer.step()
        assert [held for held in before if held() is not None] == []
