"""The way back from a conversion, and copies of converted models on disk."""

import copy
import io

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import octavo
from octavo.models import GPT2Config, build
from octavo.models import LlamaConfig as OwnLlamaConfig


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS = {
    "transformers": llama,
    "llama": lambda: build(
        OwnLlamaConfig(vocabulary=64, layers=1, width=32, heads=4, kv_heads=2, mlp_width=48, context=16, tied=True)
    ),
    "gpt2": lambda: build(GPT2Config(vocabulary=64, layers=1, width=32, heads=2, context=16)),
    "encoder": lambda: nn.Sequential(nn.Embedding(64, 32), nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0)),
}


def tokens() -> torch.Tensor:
    return torch.arange(24).view(2, 12)


def output(model: nn.Module) -> torch.Tensor:
    y = model(tokens())
    return y if isinstance(y, torch.Tensor) else y.logits


def attributes(model: nn.Module) -> dict[str, tuple[type, set[str]]]:
    return {name: (type(m), set(vars(m)) | set(m._modules)) for name, m in model.named_modules()}


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
@pytest.mark.parametrize("name", MODELS)
def test_a_restored_model_is_the_one_that_was_never_converted(name: str, recipe: str) -> None:
    model = MODELS[name]()
    plain, known, parameters = copy.deepcopy(model), attributes(model), list(model.parameters())
    report = octavo.convert(model, recipe)
    output(model).square().mean().backward()
    assert set(octavo.restore(model)) >= {name.removesuffix(".in_proj_weight") for name in report.converted}
    model.zero_grad()
    assert attributes(model) == known
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    y, exact = output(model), output(plain)
    assert torch.equal(y, exact)
    y.square().mean().backward()
    exact.square().mean().backward()
    for (key, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), key
    assert octavo.restore(model) == []


def test_hooks_survive_the_way_there_and_back() -> None:
    model, calls = nn.Sequential(nn.Linear(8, 8)), []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    for change in (octavo.convert, octavo.restore):
        change(model)
        model(torch.randn(2, 8))
    assert calls == [1, 1]


def test_a_restored_model_can_be_converted_again() -> None:
    model = llama()
    octavo.convert(model)
    before = output(model)
    octavo.restore(model)
    assert octavo.convert(model).fused
    assert torch.equal(output(model), before)


@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_can_be_saved_whole(name: str) -> None:
    model = MODELS[name]().eval()
    octavo.convert(model)
    file = io.BytesIO()
    torch.save(model, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert torch.equal(output(loaded), output(model))
    assert [type(m) for m in loaded.modules()] == [type(m) for m in model.modules()]
    assert set(octavo.restore(loaded)) == set(octavo.restore(model))


def test_a_copy_of_a_converted_model_is_independent() -> None:
    model = llama()
    octavo.convert(model)
    other = copy.deepcopy(model)
    octavo.restore(model)
    assert isinstance(other.model.layers[0].mlp, octavo.nn.SwiGLU)
    assert other.model.layers[0].qkv.owner is other.model.layers[0]


def test_restore_takes_a_module() -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, got 5"):
        octavo.restore(5)
