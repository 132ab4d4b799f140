"""Conversion of a model: what is swapped, what is left, and that nothing else changes."""

import copy

import pytest
import torch
from torch import nn

import octavo
from octavo.models import GPT2Config, LlamaConfig, build

LLAMA = LlamaConfig(vocabulary=64, layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, context=16, tied=False)


def test_linears_change_class_and_nothing_else() -> None:
    model = build(LLAMA)
    before = copy.deepcopy(model.state_dict())
    names = [name for name, _ in model.named_parameters()]
    parameters = list(model.parameters())
    report = octavo.convert(model, "rowwise")
    assert len(report.converted) == 14
    assert report.skipped == {"lm_head": "an output head or router (lm_head)"}
    assert [name for name, _ in model.named_parameters()] == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[k], before[k]) for k in before)
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.embed_tokens) is nn.Embedding


def test_delayed_histories_stay_out_of_the_state_dict() -> None:
    model = build(LLAMA)
    before = model.state_dict().keys()
    octavo.convert(model, "delayed")
    assert model.state_dict().keys() == before
    model.load_state_dict(build(LLAMA).state_dict())


def test_a_tied_head_is_skipped_whatever_its_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.unembed = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
            self.unembed.weight = self.embed.weight

    report = octavo.convert(Tied())
    assert report.converted == ["body"]
    assert "embedding" in report.skipped["unembed"]


def test_routers_and_globs_are_skipped() -> None:
    model = nn.ModuleDict(
        {"router": nn.Linear(8, 4), "gate": nn.Linear(8, 4), "gate_proj": nn.Linear(8, 8), "down_proj": nn.Linear(8, 8)}
    )
    report = octavo.convert(model, "tensorwise", skip=["down*"])
    assert report.converted == ["gate_proj"]
    assert report.skipped["down_proj"] == "skip='down*'"
    text = str(report)
    assert "tensorwise: 1 linear layer converted, 3 skipped" in text
    assert "gate_proj" in text
    assert "emulated" in text


def test_the_gate_of_an_mlp_is_no_router() -> None:
    mlp = nn.ModuleDict({"gate": nn.Linear(8, 24), "up": nn.Linear(8, 24), "down": nn.Linear(24, 8)})
    assert octavo.convert(nn.ModuleDict({"mlp": mlp})).converted == ["mlp.gate", "mlp.up", "mlp.down"]


def test_subclasses_with_a_forward_of_their_own_are_left() -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "mlp": nn.Linear(8, 8)})
    report = octavo.convert(model)
    assert report.converted == ["mlp"]
    reason = "multi-head attention reads its weight directly and never calls it"
    assert report.skipped == {"attention.out_proj": reason}


def test_a_layer_of_a_dtype_that_fp8_is_not_computed_from_is_skipped() -> None:
    model = nn.ModuleDict({"waves": nn.Linear(8, 8, dtype=torch.complex64), "body": nn.Linear(8, 8)})
    report = octavo.convert(model)
    assert report.converted == ["body"]
    assert "torch.complex64" in report.skipped["waves"]


def test_a_layer_that_a_second_conversion_skips_is_restored() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    octavo.convert(model, "tensorwise")
    report = octavo.convert(model, "rowwise", skip=["0"])
    assert report.skipped == {"0": "skip='0'"}
    assert (type(model[0]), type(model[1])) == (nn.Linear, octavo.Linear)


@pytest.mark.parametrize("model", [5, nn.Linear, None])
def test_what_is_no_module_is_refused(model: object) -> None:
    with pytest.raises(TypeError, match=r"convert takes a torch\.nn\.Module, got"):
        octavo.convert(model)


def test_a_preset_that_was_not_called_is_refused() -> None:
    with pytest.raises(TypeError, match=r"call it, rowwise\(\)"):
        octavo.convert(nn.Sequential(nn.Linear(4, 4)), octavo.PRESETS["rowwise"])


def test_hooks_survive() -> None:
    linear = nn.Linear(8, 8)
    calls = []
    linear.register_forward_hook(lambda *_: calls.append(1))
    octavo.convert(nn.Sequential(linear))
    linear(torch.randn(2, 8))
    assert calls == [1]


def test_converting_again_changes_the_recipe() -> None:
    model = build(GPT2Config(vocabulary=64, layers=1, width=32, heads=2, context=16))
    octavo.convert(model, "delayed")
    octavo.convert(model, "bf16")
    tokens = torch.randint(64, (1, 16))
    plain = build(model.config)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens), plain(tokens))
    assert not octavo.scale_state(model)


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = build(LLAMA)
        octavo.convert(model, "delayed")
        assert model(torch.zeros(2, 16, dtype=torch.int64)).shape == (2, 16, 64)


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (nn.Sequential(nn.Conv2d(1, 1, 1)), {}, "no linear layer"),
        (nn.ModuleDict({"lm_head": nn.Linear(4, 4)}), {}, "every linear layer"),
        (nn.Sequential(nn.Linear(4, 4)), {"recipe": "rowise"}, "rowwise, rowwise_dw_bf16"),
        (nn.Sequential(nn.Linear(4, 4)), {"skip": ["block*"]}, "matches no linear layer; the model has 1, named '0'$"),
        (nn.Sequential(nn.Conv2d(1, 1, 1)), {}, "matrices are 0.weight .convolution"),
        (nn.MultiheadAttention(8, 2), {}, "multi-head attention reads its weight directly"),
    ],
)
def test_what_cannot_be_converted_says_so(model: nn.Module, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        octavo.convert(model, **arguments)
    assert not any(isinstance(m, octavo.Linear) for m in model.modules())
