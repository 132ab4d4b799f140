"""`convert(model, batch=...)`: a traced forward pass gives the FLOPs of the report."""

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import octavo
from octavo.models import LlamaConfig, build


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.patches = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 32, 4, 4)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
        self.unused, self.head = nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(self.stem(x)).flatten(2).transpose(1, 2)
        return self.head(self.encoder(x).mean(1))


IMAGES = torch.randn(2, 3, 16, 8)
FLOPS = {  # 2 * rows * N * K by hand; 8 patches of 2 images
    "stem.weight": 2 * (2 * 16 * 8) * 3 * 27,
    "patches.weight": 2 * 16 * 32 * 48,
    "encoder.self_attn.in_proj_weight": 2 * 16 * 96 * 32,
    "encoder.self_attn.out_proj.weight": 2 * 16 * 32 * 32,
    "encoder.linear1.weight": 2 * 16 * 64 * 32,
    "encoder.linear2.weight": 2 * 16 * 64 * 32,
    "head.weight": 2 * 2 * 10 * 32,
    "attention": 2 * 2 * 2 * 8 * 8 * 32,
}


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("converted_before", [False, True])
def test_the_shares_are_those_of_the_flops_of_the_pass(converted_before: bool, evaluation: bool) -> None:
    model = Vision().eval() if evaluation else Vision()
    model.requires_grad_(not evaluation)  # PyTorch's fast path would hide the layers
    if converted_before:
        octavo.convert(model, "tensorwise")
    coverage, total = octavo.convert(model, batch=IMAGES).coverage, sum(FLOPS.values())
    assert {entry.name: entry.flops for entry in coverage.left} == {
        "stem.weight": pytest.approx(FLOPS["stem.weight"] / total),
        "patches.weight": pytest.approx(FLOPS["patches.weight"] / total),
        "head.weight": pytest.approx(FLOPS["head.weight"] / total),
    }
    assert coverage.activations == pytest.approx(FLOPS["attention"] / total)
    assert coverage.flops + coverage.activations + sum(e.flops for e in coverage.left) == pytest.approx(1)
    assert f"{100 * coverage.flops:.1f} % of the FLOPs (of the batch)" in str(coverage)


def test_the_flops_are_those_that_pytorch_counts() -> None:
    model = build(LlamaConfig(vocabulary=64, layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, context=16))
    tokens = torch.randint(64, (2, 16))
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        build(model.config)(tokens.to("meta"))
    head = 2 * 32 * 32 * 64 / counter.get_total_flops()
    report = octavo.convert(model, batch=[tokens])
    assert {entry.name: entry.flops for entry in report.coverage.left}["lm_head.weight"] == pytest.approx(head, rel=0.1)


def test_without_a_batch_parameters_stand_for_flops() -> None:
    coverage = octavo.convert(nn.ModuleDict({"a": nn.Linear(8, 24), "lm_head": nn.Linear(8, 8)})).coverage
    assert coverage.flops == pytest.approx(0.75)
    assert coverage.left[0].flops == pytest.approx(0.25)
    assert "75.0 % of the FLOPs (estimated from the sizes of the weights)" in str(coverage)


def test_a_layer_whose_weight_is_read_and_that_is_never_called_is_skipped() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.called, self.read = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.called(x), self.read.weight)

    assert octavo.convert(Reads()).converted == ["called", "read"]
    report = octavo.convert(Reads(), batch=torch.randn(4, 8))
    assert report.skipped == {"read": "the model reads its weight without calling it"}


def test_a_pass_that_cannot_be_traced_changes_nothing() -> None:
    class Looks(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x

    model = Looks(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="Looks cannot be traced: its code depends on the values of a tensor"):
        octavo.convert(model, batch=torch.randn(4, 8))
    with pytest.raises(RuntimeError, match="fails in a trace with these inputs"):
        octavo.convert(nn.Sequential(nn.Linear(8, 8)), batch=torch.randn(4, 7))
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("converted_before", [False, True])
def test_experts_count_the_rows_that_are_routed_to_them(converted_before: bool) -> None:
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config)
    if converted_before:
        octavo.convert(model)
    batch = {"input_ids": torch.zeros(2, 16, dtype=torch.long), "use_cache": False}
    left = {entry.name: entry.flops for entry in octavo.convert(model, skip=["*.experts"], batch=batch).coverage.left}
    head, experts = 2 * 32 * 64 * 32, 2 * (2 * 32) * 3 * 48 * 32  # 32 tokens, each through 2 experts
    found = sum(flops for name, flops in left.items() if ".experts." in name)
    assert found / left["lm_head.weight"] == pytest.approx(experts / head)
