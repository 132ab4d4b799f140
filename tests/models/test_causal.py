"""Causal or not, by what a model computes."""

import pytest
import torch
from torch import nn

from octavo.hf.meta_model import is_causal
from octavo.models import GPT2Config, LlamaConfig, build

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "config", [LlamaConfig(50, 2, 32, 2, 1, 64, 16), GPT2Config(50, 2, 32, 2, 16)], ids=["llama", "gpt2"]
)
def test_our_models_are_causal(config):
    assert is_causal(build(config), 50)


@pytest.mark.parametrize("decoder", [False, True])
def test_one_class_of_transformers_is_causal_or_not_by_its_settings(decoder):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=50, **sizes, is_decoder=decoder)
    assert is_causal(transformers.BertLMHeadModel(config), 50) is decoder


class Shifted(nn.Module):
    """Sees one token ahead, through a small weight."""

    def __init__(self, weight):
        super().__init__()
        self.embed, self.weight = nn.Embedding(2, 4), weight

    def forward(self, tokens):
        x = self.embed(tokens)
        return x + self.weight * x.roll(-1, dims=1)


def test_a_small_leak_counts_and_the_mode_is_given_back():
    assert not is_causal(Shifted(1e-3), 2)
    assert is_causal(Shifted(0.0), 2)
    model = Shifted(0.0)
    for training in (True, False):
        model.train(training)
        assert is_causal(model, 2)
        assert model.training is training


def test_dropout_does_not_disturb_the_answer():
    model = nn.Sequential(nn.Embedding(4, 8), nn.Dropout(0.5))
    state = torch.get_rng_state()
    assert is_causal(model, 4)
    assert torch.equal(torch.get_rng_state(), state)
