"""A mixture: the function of transformers' models, its balance loss, and its errors."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from octavo.models import Mixture, MixtureConfig

SIZES = {
    "vocabulary": 64, "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "mlp_width": 48, "context": 32,
    "tied": False, "experts": 4,
}  # fmt: skip


def built(**changes: object) -> Mixture:
    model = Mixture(MixtureConfig(**(SIZES | changes)))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3) if p.ndim > 1 else torch.nn.init.uniform_(p, 0.5, 1.5)
    return model


@pytest.mark.parametrize(("shared", "name"), [(0, "MixtralForCausalLM"), (16, "Qwen2MoeForCausalLM")])
def test_transformers_opens_it_and_computes_the_same(tmp_path, shared, name):
    model = built(shared_width=shared).eval()
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_hf() | {"dtype": "float32"}))
    save_file(model.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    theirs, loaded = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(theirs).__name__ == name
    assert not any(loaded.values())
    tokens = torch.randint(64, (2, 16))
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_the_balance_loss_is_that_of_the_switch_transformer():
    model = built(balance=0.5)
    tokens, seen = torch.randint(64, (2, 16)), []
    for block in model.model.layers:
        block.mlp.gate.register_forward_hook(lambda module, args, logits: seen.append(logits.detach().double()))
    assert model.take_balance() is None  # before the first forward pass
    model(tokens)
    expected = []
    for logits in seen:
        p = logits.softmax(-1)
        shares = torch.nn.functional.one_hot(p.topk(2).indices, 4).double().mean((0, 1))
        expected.append(0.5 * 4 * (shares * p.mean(0)).sum())
    found = model.take_balance()
    assert model.take_balance() is None
    torch.testing.assert_close(found.double(), torch.stack(expected).mean(), rtol=1e-6, atol=0)
    found.backward()
    assert all(block.mlp.gate.weight.grad.any() for block in model.model.layers)
    model.eval()(tokens)
    assert model.take_balance() is None
    without = built(balance=0.0)
    without(tokens)
    assert without.take_balance() is None


def test_its_weights_are_drawn_as_those_of_the_other_models():
    model = Mixture(MixtureConfig(**(SIZES | {"width": 64, "mlp_width": 96, "layers": 8})))
    experts = model.model.layers[0].mlp.experts
    assert float(experts.gate_up_proj.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert float(experts.down_proj.detach().std()) == pytest.approx(0.02 / 4, rel=0.05)
