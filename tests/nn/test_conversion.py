"""Conversion changes the classes of linear layers, reports it, and changes nothing else."""

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


def test_the_report_is_a_table_of_the_layers() -> None:
    model = nn.ModuleDict({"gate_proj": nn.Linear(8, 8), "down_proj": nn.Linear(8, 8)})
    text = str(octavo.convert(model, "tensorwise", skip=["down*"]))
    assert "tensorwise: 1 linear layer converted, 1 skipped" in text
    assert "gate_proj" in text
    assert "skipped: skip='down*'" in text
    assert "emulated" in text


def test_a_layer_that_a_second_conversion_skips_is_restored() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    octavo.convert(model, "tensorwise")
    report = octavo.convert(model, "rowwise", skip=["0"])
    assert report.skipped == {"0": "skip='0'"}
    assert (type(model[0]), type(model[1])) == (nn.Linear, octavo.Linear)


def test_the_report_of_a_layer_alone_calls_it_the_model() -> None:
    report = octavo.convert(nn.Linear(16, 8))
    assert report.converted == [""]
    assert str(report).splitlines()[-1].split() == ["(model)", "8", "x", "16", "converted"]


@pytest.mark.parametrize(
    ("model", "shown"), [(5, "5"), (nn.Linear, r".*\.Linear.*"), (None, "None"), (torch.ones(9, 9), "a Tensor")]
)
def test_what_is_no_module_is_refused(model: object, shown: str) -> None:
    with pytest.raises(TypeError, match=rf"convert takes a torch\.nn\.Module, got {shown}: pass the model itself"):
        octavo.convert(model)


def test_a_preset_that_was_not_called_is_refused() -> None:
    with pytest.raises(TypeError, match=r"call it, rowwise\(\)"):
        octavo.convert(nn.Sequential(nn.Linear(4, 4)), octavo.PRESETS["rowwise"])


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
    model.to_empty(device="cpu")
    assert all(not t.any() for t in octavo.scale_state(model).values())


def test_the_device_decides_the_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    for weights, device, expected in (("meta", None, "xpu"), ("meta", "cpu", "cpu"), ("cpu", None, "cpu")):
        with torch.device(weights):
            model = build(LLAMA)
        report = octavo.convert(model, device=device)
        assert {backend.reason for backend in report.backends.values()} == {
            f"{expected} has no FP8 GEMM: exact, in float32"
        }


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (nn.ModuleDict({"lm_head": nn.Linear(4, 4)}), {}, "every linear layer"),
        (nn.Sequential(nn.Linear(4, 4)), {"recipe": "rowise"}, "rowwise, rowwise_dw_bf16"),
        (nn.Sequential(nn.Linear(4, 4)), {"skip": ["block*"]}, "matches no linear layer; the model has 1, named '0'$"),
    ],
)
def test_what_cannot_be_converted_says_so(model: nn.Module, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        octavo.convert(model, **arguments)
    assert not any(isinstance(m, octavo.Linear) for m in model.modules())
