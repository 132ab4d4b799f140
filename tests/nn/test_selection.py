"""Which linear layers of a model are selected, and why the others are not; asking changes nothing."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from transformers.pytorch_utils import Conv1D

import octavo
from octavo.models import LlamaConfig, build
from octavo.nn import select_linears

LLAMA = LlamaConfig(vocabulary=64, layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, context=16, tied=False)


def skipped(model: nn.Module, *skip: str) -> dict[str, str]:
    return {layer.name: layer.reason for layer in select_linears(model, skip) if layer.reason}


def converts(model: nn.Module, *skip: str) -> list[str]:
    return [layer.name for layer in select_linears(model, skip) if not layer.reason]


def test_asking_changes_no_module_and_conversion_gives_the_same_answer() -> None:
    with torch.device("meta"):
        model = build(LLAMA)
    classes = [type(module) for module in model.modules()]
    layers = select_linears(model, ["*.down_proj"])
    assert [type(module) for module in model.modules()] == classes
    assert all(model.get_submodule(layer.name) is layer.module for layer in layers)
    report = octavo.convert(model, skip=["*.down_proj"])
    assert report.converted == [layer.name for layer in layers if not layer.reason]
    assert report.skipped == {layer.name: layer.reason for layer in layers if layer.reason}


def test_a_converted_model_is_selected_as_before() -> None:
    model = build(LLAMA)
    before = select_linears(model, ())
    octavo.convert(model)
    assert select_linears(model, ()) == before


def test_a_tied_head_is_skipped_whatever_its_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.unembed = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
            self.unembed.weight = self.embed.weight

    assert converts(Tied()) == ["body"]
    assert skipped(Tied()) == {"unembed": "it shares its weight with the embedding"}


def test_routers_and_globs_are_skipped() -> None:
    model = nn.ModuleDict(
        {"router": nn.Linear(8, 4), "gate": nn.Linear(8, 4), "gate_proj": nn.Linear(8, 8), "down_proj": nn.Linear(8, 8)}
    )
    assert converts(model, "down*") == ["gate_proj"]
    assert skipped(model, "down*") == {
        "router": "an output head or router (router)",
        "gate": "an output head or router (gate)",
        "down_proj": "skip='down*'",
    }


def test_the_gate_of_an_mlp_is_no_router() -> None:
    mlp = nn.ModuleDict({"gate": nn.Linear(8, 24), "up": nn.Linear(8, 24), "down": nn.Linear(24, 8)})
    assert converts(nn.ModuleDict({"mlp": mlp})) == ["mlp.gate", "mlp.up", "mlp.down"]


def test_subclasses_with_a_forward_of_their_own_are_skipped() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    class ScaledConv1D(Conv1D):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "scaled": Scaled(8, 8), "mlp": nn.Linear(8, 8)})
    model.update({"conv1d": Conv1D(8, 8), "scaled_conv1d": ScaledConv1D(8, 8)})
    assert converts(model) == ["mlp", "conv1d"]
    assert skipped(model) == {
        "attention.out_proj": "multi-head attention reads its weight directly and never calls it",
        "scaled": "a Scaled, whose forward is its own",
        "scaled_conv1d": "a ScaledConv1D, whose forward is its own",
    }


def test_the_step_of_a_state_space_layer_is_skipped() -> None:
    mixer = nn.Module()
    mixer.A_log, mixer.dt_proj, mixer.x_proj = nn.Parameter(torch.zeros(8)), nn.Linear(8, 8), nn.Linear(8, 8)
    assert converts(mixer) == ["x_proj"]
    assert skipped(mixer) == {"dt_proj": "the state-space layer reads its weight directly and never calls it"}


def test_a_weight_that_is_computed_from_parameters_is_skipped() -> None:
    model = nn.Sequential(nn.Linear(8, 8), parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    prune.l1_unstructured(model[0], "weight", 0.5)
    assert skipped(model) == {
        "0": "its weight is no parameter, but computed from some, as torch.nn.utils.prune does",
        "1": "a ParametrizedLinear, whose forward is its own",
    }
    assert converts(model) == ["2"]
    report = octavo.convert(model, only_if_faster=True, batch=torch.randn(4, 8))
    assert [row.name for row in report.rows] == ["0", "1", "2"]


def test_a_layer_that_was_parametrized_after_a_conversion_still_runs_its_recipe() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    octavo.convert(model)
    parametrizations.weight_norm(model[0])
    assert skipped(model) == {"0": "it was parametrized after an earlier conversion: it still runs rowwise"}
    with pytest.raises(ValueError, match=r"^0 was converted and then parametrized.*remove_parametrizations"):
        octavo.restore(model)
    assert isinstance(model[1], octavo.nn.Linear)
    parametrize.remove_parametrizations(model[0], "weight")
    assert octavo.restore(model) == ["0", "1"]
    assert type(model[0]) is nn.Linear


def test_a_layer_of_a_dtype_that_fp8_is_not_computed_from_is_skipped() -> None:
    model = nn.ModuleDict({"waves": nn.Linear(8, 8, dtype=torch.complex64), "body": nn.Linear(8, 8)})
    assert converts(model) == ["body"]
    assert "torch.complex64" in skipped(model)["waves"]


@pytest.mark.parametrize(
    ("model", "skip", "message"),
    [
        (nn.Sequential(nn.Conv2d(1, 1, 1)), [], "no linear layer"),
        (nn.Sequential(nn.Conv2d(1, 1, 1)), [], r"matrices are 0\.weight .convolution"),
        (nn.LayerNorm(4), [], "None of its other parameters"),
        (nn.MultiheadAttention(8, 2), [], "multi-head attention reads its weight directly"),
    ],
)
def test_a_model_without_a_layer_to_convert_is_an_error(model: nn.Module, skip: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_linears(model, skip)


def test_a_model_that_is_quantized_already_is_named() -> None:
    packed = nn.Module()
    packed.register_buffer("weight", torch.zeros(16, 16, dtype=torch.float8_e4m3fn))
    for model in (nn.ModuleDict({"layer": packed}), nn.ModuleDict({"layer": packed, "lm_head": nn.Linear(16, 16)})):
        with pytest.raises(
            ValueError, match=r"weights in eight bits already: convert the model in BF16.*octavo unpack"
        ):
            select_linears(model)
