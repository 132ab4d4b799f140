"""`convert` finds experts, ours and those of transformers, and changes nothing but the numbers' precision."""

import copy
import pickle

import pytest
import torch
from metrics import sqnr
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import octavo
from octavo.nn import Experts, GroupedLinear
from octavo.nn.expert_conversion import expert_rows, find_experts, to_fp8_experts
from octavo.ops.grouped_gemm import backend
from octavo.recipe import rowwise

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.1,
}  # fmt: skip
MODELS = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4}),
    "qwen3": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "deepseek": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        {
            "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
            "moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8,
        },
    ),
}  # fmt: skip


def built(kind: str) -> nn.Module:
    cls, config, extra = MODELS[kind]
    torch.manual_seed(0)
    return cls(config(**{**COMMON, **extra}))


def logits(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    return model(torch.randint(64, (2, 16))).logits


@pytest.mark.parametrize("kind", MODELS)
def test_the_function_is_that_of_transformers(kind):
    model = built(kind).eval()
    expected = logits(model)
    found = find_experts(model)
    assert len(found) == (1 if kind == "deepseek" else 2)
    for name, module in found.items():
        to_fp8_experts(module, None, name)  # our forward, in the model's own precision
        assert isinstance(module, Experts)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_a_converted_model_runs_its_experts_in_fp8(kind):
    model, plain = built(kind), built(kind)
    keys, classes = list(model.state_dict()), [type(m).__name__ for m in model.modules()]
    report = octavo.convert(model)
    names = [f"{name}.{leaf}" for name in find_experts(plain) for leaf in Experts.matrices]
    assert {row.name for row in report.experts} == set(names) <= set(report.converted)
    assert not [entry for entry in report.coverage.left if entry.kind == "expert stack"]
    assert f"{len(names)} stacks of experts converted" in report.summary()
    assert list(model.state_dict()) == keys
    assert [type(m).__name__ for m in model.modules() if type(m).__name__ in classes]
    exact, found = logits(plain), logits(model)
    assert 12 < sqnr(exact, found) < 60  # the choice of a router may change with the numbers that it sees
    for each, result in ((plain, exact), (model, found)):
        result.square().mean().backward()
        assert all(p.grad is not None for p in each.parameters() if p.ndim == 3)
    for name in names:
        assert sqnr(plain.get_parameter(name).grad, model.get_parameter(name).grad) > 6


def test_restore_gives_the_same_bits_again():
    model = built("mixtral")
    expected = logits(model)
    octavo.convert(model)
    assert not torch.equal(logits(model), expected)
    names = octavo.restore(model)
    assert "model.layers.0.mlp.experts" in names
    assert torch.equal(logits(model), expected)
    assert "recipe" not in vars(model.model.layers[0].mlp.experts)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_the_same(copied):
    model = built("mixtral")
    octavo.convert(model)
    assert torch.equal(logits(copied(model)), logits(model))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"recipe": "tensorwise"}, "the recipe tensorwise has no grouped GEMM: rowwise has one"),
        ({"skip": ["*.experts"]}, r"skip='*.experts'"),
        ({"only_if_faster": True}, "FP8 is emulated here: left in BF16"),
    ],
    ids=["recipe", "skip", "only if faster"],
)
def test_experts_that_are_left_out_are_named_with_the_reason(options, reason):
    model = built("mixtral")
    octavo.convert(model)  # an earlier conversion is undone
    report = octavo.convert(model, **options)
    assert {report.skipped[row.name] for row in report.experts} == {reason}
    assert f"4 stacks of experts left in high precision: {reason}" in report.summary()
    assert not any(isinstance(module, Experts) for module in model.modules())


def test_a_model_of_experts_alone():
    model = nn.ModuleDict({"a": GroupedLinear(2, 16, 32), "b": Experts(2, 16, 16), "c": nn.Linear(4, 4)})
    report = octavo.convert(model, skip=["c"])
    assert report.converted == ["a.weight", "b.gate_up_proj", "b.down_proj"]
    assert "2 x 32 x 16      converted" in str(report)
    assert [model["a"].recipe.name, model["b"].recipe.name] == ["rowwise", "rowwise"]
    assert octavo.restore(model) == ["a", "b"]
    assert model["a"].recipe is None
    with pytest.raises(ValueError, match="skip='d' matches no"):
        octavo.convert(model, skip=["d"])


def test_unknown_experts_are_left_alone():
    class OtherExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj, self.down_proj = (nn.Parameter(torch.zeros(2, 8, 8)) for _ in range(2))

    model = nn.ModuleDict({"experts": OtherExperts(), "linear": nn.Linear(16, 16)})
    report = octavo.convert(model)
    assert report.experts == ()
    assert {entry.kind for entry in report.coverage.left} == {"expert stack"}


def on_gpu(monkeypatch, capability, **options):
    """The report of a model that is converted for a GPU that is not here."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), GroupedLinear(2, 64, 64))
    return octavo.convert(model, device="cuda", **options)


def test_a_gpu_without_the_kernel_leaves_experts_in_high_precision(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    report = on_gpu(monkeypatch, (9, 4))
    assert report.converted == ["0"]
    assert report.skipped["1.weight"].endswith("e4m3fnuz with row x row scales on AMD MI300 (gfx942)")
    assert "of experts" not in report.summary().replace("stack of experts", "")


def test_the_kernels_of_experts_are_in_the_report(monkeypatch):
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    names = "y, dx, dw of experts triton: row x row scales, in groups, not measured on Ada (L40S, RTX 40)"
    report = on_gpu(monkeypatch, (8, 9))
    assert report.converted == ["0", "1.weight"]
    assert names in report.summary()
    summary = on_gpu(monkeypatch, (9, 0), recipe=rowwise("e5m2")).summary()
    assert "  y, dx, dw of experts triton: row x row scales, in groups\n" in summary


def test_sides_that_no_kernel_takes_are_named(monkeypatch):
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with torch.device("meta"):
        uneven = nn.Sequential(nn.Linear(64, 64), GroupedLinear(2, 64, 40))
    assert "no multiples of 16" in octavo.convert(uneven, device="cuda").skipped["1.weight"]


def test_narrow_experts_are_slower_and_the_report_says_so(monkeypatch):
    monkeypatch.setattr(backend, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with torch.device("meta"):
        narrow, wide = (nn.Sequential(nn.Linear(64, 64), GroupedLinear(2, 2048, n)) for n in (768, 4096))
    assert "with sides below 2048 they are slower" in octavo.convert(narrow, device="cuda").summary()
    assert "slower" not in octavo.convert(wide, device="cuda").summary()
    rows = [
        expert_rows(find_experts(m), rowwise(), torch.device("cuda"), (), only_if_faster=True) for m in (narrow, wide)
    ]
    assert [row.reason for (row,) in rows] == ["a side below 2048, where FP8 is slower on an H200: left in BF16", ""]
