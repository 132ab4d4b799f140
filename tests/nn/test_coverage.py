"""The report of a conversion names every matrix that stays in high precision, with its share of the parameters."""

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.pytorch_utils import Conv1D

import octavo
from octavo.nn.coverage import find_coverage


def share(*parameters: nn.Parameter, of: nn.Module) -> float:
    return sum(p.numel() for p in parameters) / sum(p.numel() for p in of.parameters())


def mixtral() -> nn.Module:
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=32,
    )  # fmt: skip
    return MixtralForCausalLM(config)


def test_stacked_experts_are_named_with_their_share() -> None:
    with torch.device("meta"):
        model = mixtral()
    report = octavo.convert(model, skip=["*.experts"])
    experts = [layer.mlp.experts for layer in model.model.layers]
    left = {entry.name: entry for entry in report.coverage.left}
    down = left["model.layers.*.mlp.experts.down_proj"]
    assert (down.kind, down.count, down.shape) == ("expert stack", 2, (4, 32, 48))
    assert down.share == pytest.approx(share(*(e.down_proj for e in experts), of=model))
    assert left["model.layers.*.mlp.gate.weight"].kind == "matrix of MixtralTopKRouter"
    assert left["lm_head.weight"].kind == "linear layer"
    computed = [model.get_submodule(name).weight for name in report.converted]
    assert report.coverage.computed == pytest.approx(share(*computed, of=model))
    assert f"down_proj (expert stack, 2 of [4, 32, 48], {100 * down.share:.1f} % of the parameters)" in report.summary()


def test_the_shares_add_up_to_one() -> None:
    coverage = octavo.convert(mixtral()).coverage
    parts = [coverage.computed, *(entry.share for entry in coverage.left), coverage.embeddings, coverage.other]
    assert sum(parts) == pytest.approx(1)
    assert min(parts) > 0


@pytest.mark.parametrize(
    ("module", "leaf", "kind"),
    [
        (nn.MultiheadAttention(8, 2), "in_proj_weight", "packed attention projection"),
        (nn.MultiheadAttention(8, 2, kdim=4), "k_proj_weight", "packed attention projection"),
        (nn.Conv2d(3, 8, 3), "weight", "convolution"),
        (nn.Conv1d(8, 8, 4, groups=8), "weight", "convolution"),
        (Conv1D(8, 4), "weight", "Conv1D"),
        (nn.Bilinear(4, 4, 4), "weight", "bilinear layer"),
        (nn.LSTM(4, 4), "weight_hh_l0", "recurrent layer"),
        (nn.ParameterDict({"experts": torch.zeros(4, 8, 8)}), "experts", "expert stack"),
        (nn.ParameterDict({"w1": torch.zeros(4, 8, 8)}), "w1", "stack of matrices"),
        (nn.ParameterDict({"mix": torch.zeros(8, 8)}), "mix", "matrix of ParameterDict"),
    ],
)
def test_each_kind_of_matrix_is_named(module: nn.Module, leaf: str, kind: str) -> None:
    left = find_coverage(nn.ModuleDict({"part": module, "body": nn.Linear(8, 8)}), ["body"]).left
    assert (f"part.{leaf}", kind) in {(entry.name, entry.kind) for entry in left}


def test_embeddings_norms_and_vectors_are_totals() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.body = nn.Embedding(16, 8), nn.LayerNorm([4, 8]), nn.Linear(8, 8)
            self.pos_embed, self.cls_token = nn.Parameter(torch.zeros(1, 9, 8)), nn.Parameter(torch.zeros(1, 1, 8))

    model = Patches()
    coverage = octavo.convert(model).coverage
    assert coverage.left == ()
    assert coverage.embeddings == pytest.approx(share(model.embed.weight, model.pos_embed, of=model))
    assert coverage.other == pytest.approx(
        share(model.norm.weight, model.norm.bias, model.body.bias, model.cls_token, of=model)
    )


def test_a_shared_parameter_counts_once_and_as_the_work_it_does() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
            self.head.weight, self.again = self.embed.weight, self.body

    coverage = octavo.convert(Tied()).coverage
    assert coverage.parameters == 16 * 8 + 8 * 8 + 8
    assert [(entry.name, entry.shape) for entry in coverage.left] == [("head.weight", (16, 8))]
    assert coverage.embeddings == 0
    assert "shared with the embedding" in str(coverage.left[0])
    assert "embeddings" not in str(coverage)


def test_fp8_computes_nothing_in_bf16() -> None:
    report = octavo.convert(nn.Sequential(nn.Linear(8, 8)), "bf16")
    assert report.coverage.computed == 0
    assert report.summary() == "bf16: 1 linear layer without eight-bit GEMMs: the recipe casts nothing"


def test_any_names_of_layers_can_be_asked_for() -> None:
    coverage = find_coverage(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 24, bias=False)), ["1"])
    assert coverage.computed == 0.75
    assert str(coverage.left[0]) == "0.weight (linear layer, [8, 8], 25.0 % of the parameters)"
