"""Generation on transformers' own cache, against transformers' own loop."""

import pytest
import torch
from kv_cache_examples import model_of
from transformers import Gemma2Config, Gemma2ForCausalLM

from octavo.generation import Engine, Sampling
from octavo.generation.own_cache import OwnCacheEngine, open_engine
from octavo.kv_cache.model import UnservedError

PROMPTS = [[5, 6, 7, 8, 9], [11], [3, 4, 5]]
GREEDY = Sampling(temperature=0)


def gemma2() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    config = Gemma2Config(vocab_size=97, num_hidden_layers=2, head_dim=16, initializer_range=0.3, **sizes)
    return Gemma2ForCausalLM(config).eval()


def test_the_models_and_lengths_that_our_cache_serves_have_it():
    llama, mistral = model_of("llama"), model_of("mistral", sliding_window=20)
    assert type(open_engine(llama, context=128, tokens=500)) is Engine
    assert type(open_engine(mistral, context=128, tokens=20)) is Engine
    assert type(open_engine(mistral, context=128, tokens=21)) is OwnCacheEngine
    assert open_engine(mistral, context=128, tokens=21, kv_cache="fp8").limit == 20
    assert type(open_engine(gemma2(), context=128, tokens=9)) is OwnCacheEngine
    with pytest.raises(UnservedError, match="softcap"):
        open_engine(gemma2(), context=128, tokens=9, kv_cache="fp8")


@pytest.mark.parametrize("count", [1, 24])
@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_each_prompt_of_a_batch_has_the_tokens_of_transformers(name, count):
    model = gemma2() if name == "gemma2" else model_of("mistral", sliding_window=20)
    found = list(OwnCacheEngine(model, context=128).generate(PROMPTS, count, GREEDY))
    for row, prompt in zip(zip(*found, strict=True), PROMPTS, strict=True):
        ids = torch.tensor([prompt])
        required = model.generate(
            ids, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(ids), eos_token_id=None
        )
        assert list(row) == required[0, len(prompt) :].tolist()


def test_a_text_goes_on_past_the_context():
    engine = OwnCacheEngine(gemma2(), context=8)
    assert len(list(engine.generate([[1, 2, 3]], 30, GREEDY))) == 30
    engine.warm_up(2, 5)


def test_warm_up_where_kernels_can_be_compiled(monkeypatch):
    monkeypatch.setattr("octavo.generation.engine.has_kernels", lambda device: True)
    open_engine(gemma2(), context=64, tokens=9).warm_up(2, 5)
