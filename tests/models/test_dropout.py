"""Dropout in our models, and GPT-2 without biases."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from octavo import convert
from octavo.models import GPT2Config, LlamaConfig, build

LLAMA, GPT2 = LlamaConfig(61, 2, 32, 2, 1, 64, 20), GPT2Config(61, 2, 32, 2, 20)
MODELS = pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
TOKENS = torch.arange(40).view(2, 20)


@MODELS
@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_dropout_is_of_training_alone_and_repeats_with_the_seed(config, recipe):
    model = build(replace(config, dropout=0.5))
    if recipe:
        convert(model, recipe)
    model.eval()
    assert torch.equal(model(TOKENS), model(TOKENS))
    model.train()
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(model(TOKENS))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@MODELS
def test_without_dropout_no_random_number_is_drawn(config):
    model = build(config).train()
    state = torch.get_rng_state()
    trained = model(TOKENS)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(trained, model.eval()(TOKENS))


@MODELS
def test_dropout_acts_where_gpt2_has_it(config, monkeypatch):
    """On the embeddings, and in each layer on the attention's probabilities and on both sums to the stream."""
    model = build(replace(config, dropout=0.25)).train()
    places, probabilities = [], []
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda module, args, output, name=name: places.append(name))
    attention = torch.nn.functional.scaled_dot_product_attention

    def noted(*args, dropout_p=0.0, **kwargs):
        probabilities.append(dropout_p)
        return attention(*args, dropout_p=dropout_p, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    model(TOKENS)
    assert len(places) == len(set(places)) == 1 + 2 * 2
    assert probabilities == [0.25, 0.25]
    model.eval()(TOKENS)
    assert probabilities[2:] == [0.0, 0.0]


@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_gpt2_without_bias_has_none_and_trains_none(recipe):
    model = build(replace(GPT2, bias=False))
    if recipe:
        convert(model, recipe)
    model(TOKENS).square().mean().backward()
    assert not [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m.bias is not None]
    norms = [m for m in model.modules() if isinstance(m, nn.LayerNorm)]
    assert len(norms) == 5
    for norm in norms:
        assert norm.bias.grad is None
        assert not norm.bias.any()
        assert norm.weight.grad.any()
