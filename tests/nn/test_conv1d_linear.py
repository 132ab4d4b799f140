"""`Conv1D` of transformers runs as the linear layer that it is."""

import copy
import pickle

import pytest
import torch
from torch import nn

import octavo
from octavo.nn.linear import Conv1D

transformers = pytest.importorskip("transformers")

RECIPES = ["bf16", "rowwise", "tensorwise", "blockwise", "delayed", "rowwise_dw_bf16"]


def pair():
    """A `Conv1D`, and the `nn.Linear` that computes the same."""
    conv = transformers.pytorch_utils.Conv1D(96, 64)
    linear = nn.Linear(64, 96)
    with torch.no_grad():
        conv.bias.normal_()
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    return conv, linear


def run(layer, x, dy):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_computes_what_a_linear_layer_of_the_transposed_weight_computes(recipe):
    conv, linear = pair()
    octavo.convert(nn.Sequential(conv), recipe)
    octavo.convert(nn.Sequential(linear), recipe)
    x, dy = torch.randn(2, 32, 64), torch.randn(2, 32, 96)
    (y, dx, dw, db), from_linear = run(conv, x, dy), run(linear, x, dy)
    for actual, expected in zip((y, dx, dw.t(), db), from_linear, strict=True):
        assert torch.equal(actual, expected)
    assert dw.is_contiguous()


def test_its_state_and_class_are_those_of_the_unconverted_layer():
    conv, _ = pair()
    before = {name: t.clone() for name, t in conv.state_dict().items()}
    model = nn.Sequential(conv)
    for recipe in ("rowwise", "delayed"):  # converted twice
        octavo.convert(model, recipe)
    assert isinstance(conv, transformers.pytorch_utils.Conv1D)
    assert type(conv).__name__ == "Conv1D"
    assert {name: t.shape for name, t in conv.state_dict().items()} == {n: t.shape for n, t in before.items()}
    x = torch.randn(4, 64)
    y = conv(x)
    for other in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
        assert torch.equal(other(x), y)
    assert octavo.restore(model) == ["0"]
    assert type(conv) is transformers.pytorch_utils.Conv1D
    assert torch.equal(conv(x), torch.addmm(before["bias"], x, before["weight"]))
    assert conv(x[:0]).shape == (0, 96)


def test_every_layer_of_a_gpt2_is_converted_and_trains():
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    plain = copy.deepcopy(model).eval()
    report = octavo.convert(model, "rowwise")
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert report.converted == [f"transformer.h.{layer}.{name}" for layer in (0, 1) for name in names]
    assert {row.name: row.shape for row in report.rows}["transformer.h.0.attn.c_attn"] == (96, 32)
    assert report.skipped == {"lm_head": "it shares its weight with the embedding"}
    layers = [m for m in model.modules() if isinstance(m, Conv1D)]
    assert len(layers) == 8
    assert report.coverage.computed == pytest.approx(
        sum(m.weight.numel() for m in layers) / sum(p.numel() for p in model.parameters())
    )
    tokens = torch.arange(32).view(2, 16)
    with torch.no_grad():
        difference = (model.eval()(tokens).logits - plain(tokens).logits).norm() / plain(tokens).logits.norm()
    assert 1e-4 < difference < 0.1
    model.train()(tokens, labels=tokens).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
