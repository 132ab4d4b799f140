"""Packed experts: each with scales of its own, as transformers and our reader open them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from metrics import distance
from safetensors.torch import load_file, save_file
from tiny_models import make_model, open_theirs, outputs, write_text
from typer.testing import CliRunner

import octavo
from octavo.artifact.files import ArtifactError
from octavo.artifact.packed.scheme import get_scheme
from octavo.evaluation import PromptOptions
from octavo.evaluation.limits import Budget
from octavo.ops import quantize
from octavo.packing import PackOptions, pack, pack_within
from octavo.runtime.packed_experts import PackedGroupedLinear
from octavo.verification import verify
from octavo_cli.app import app

HOW: list[dict[str, Any]] = [
    {"scheme": "channel"},
    {"scheme": "block"},
    {"scheme": "block", "layout": "fp8"},
    {"scheme": "tensor"},
]
KINDS = ["mixtral", "qwen3moe"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("mixtures")
    sizes = {"moe_intermediate_size": 128, "intermediate_size": 128}
    return {kind: make_model(root / kind, kind, **sizes) for kind in KINDS}


def is_expert(name: str) -> bool:
    return ".experts." in name


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW, ids=lambda how: " ".join(how.values()))
@pytest.mark.parametrize("kind", KINDS)
def test_every_reader_opens_packed_experts(sources, tmp_path, kind, how):
    report = pack(sources[kind], tmp_path / "packed", experts=True, **how)
    assert sum(map(is_expert, report.packed)) == 2 * 4 * 3
    assert [entry.kind for entry in report.not_linear] == [f"matrix of {kind.title().replace('moe', 'Moe')}TopKRouter"]
    assert 0.5 < report.ratio < 0.52
    ours, theirs = octavo.load(tmp_path / "packed"), open_theirs(tmp_path / "packed")
    expected = theirs.state_dict()
    experts = {name: m for name, m in ours.named_modules() if isinstance(m, PackedGroupedLinear)}
    assert len(experts) == 2 * 2
    for name, stack in experts.items():
        assert torch.equal(stack.dequantize(torch.bfloat16), expected[name]), name
    assert distance(outputs(ours), outputs(theirs)) < 0.3  # without a GPU, transformers rounds no inputs of experts
    found = verify(tmp_path / "packed", sources[kind])
    assert found.ok, [str(finding) for finding in found.findings]
    rounded = found.readers[0].distance
    assert rounded is not None
    assert rounded == 0 or how.get("layout") == "fp8"  # the reference has each bit of transformers' emulation


def test_the_bytes_are_those_of_each_expert_alone(sources, tmp_path):
    pack(sources["qwen3moe"], tmp_path / "packed", experts=True, scheme="channel")
    plain, packed = (load_file(f / "model.safetensors") for f in (sources["qwen3moe"], tmp_path / "packed"))
    names = [name for name in plain if is_expert(name)]
    for name in names:
        q = quantize(plain[name], get_scheme("channel").weight)
        assert torch.equal(packed[name].view(torch.uint8), q.data.view(torch.uint8))
        assert torch.equal(packed[f"{name}_scale"].float().view(-1, 1), q.scale)
    assert len(names) == 2 * 4 * 3


def test_the_experts_of_a_layer_stay_in_bf16_and_are_listed(sources, tmp_path):
    report = pack(sources["qwen3moe"], tmp_path / "packed", experts=True, skip=["model.layers.0.mlp.experts"])
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    left = [f"model.layers.0.mlp.experts.{e}.{leaf}_proj" for e in range(4) for leaf in ("gate", "up", "down")]
    assert set(left) < set(config["ignore"])
    assert not set(left) & report.packed.keys()
    assert sum(map(is_expert, report.packed)) == 4 * 3
    assert verify(tmp_path / "packed", sources["qwen3moe"]).ok


@pytest.mark.parametrize(
    "how", [{"skip": ["model.layers.0.mlp.experts.2.*"]}, {"layers": {"model.layers.0.mlp.experts.2.*": "block"}}]
)
def test_a_stack_has_one_scheme(sources, tmp_path, how):
    """transformers computes NaN from a stack that is packed in part."""
    with pytest.raises(ValueError, match=r"0\.mlp\.experts\.gate_up_proj.*.*experts\.2\.gate_proj (BF16|b)"):
        pack(sources["qwen3moe"], tmp_path / "packed", experts=True, **how)


def test_a_stack_that_others_packed_in_part_runs_in_bf16(sources, tmp_path):
    pack(sources["mixtral"], tmp_path / "packed", experts=True)
    folder, name = tmp_path / "packed", "model.layers.0.block_sparse_moe.experts.2.w2"
    tensors, plain = (load_file(f / "model.safetensors") for f in (folder, sources["mixtral"]))
    tensors[f"{name}.weight"] = plain[f"{name}.weight"]
    del tensors[f"{name}.weight_scale"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"].append(name)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=r"\(11 such layers\) .* widened to BF16, since other matrices of its stack"):
        model = octavo.load(folder)
    experts = [layer.mlp.experts for layer in model.model.layers]
    assert [type(m).__name__ for m in experts] == ["MixtralExperts", "PackedExperts"]
    assert torch.equal(experts[0].down_proj[2], plain[f"{name}.weight"])
    scale = tensors[f"{name}.weight_scale".replace("experts.2", "experts.1")]
    wide = (tensors[f"{name}.weight".replace("experts.2", "experts.1")].float() * scale).bfloat16()
    assert torch.equal(experts[0].down_proj[1], wide)


def test_the_quality_of_each_expert_is_measured(sources, tmp_path):
    """And an expert that no token reached has no number."""
    pack(sources["qwen3moe"], tmp_path / "packed", experts=True)
    report = verify(
        tmp_path / "packed", sources["qwen3moe"], [str(write_text(tmp_path / "text"))], prompts=PromptOptions(2, 16)
    )
    seen = {layer.name: layer.output_sqnr for layer in report.layers if is_expert(layer.name)}
    assert len(seen) == 2 * 4 * 3
    assert sum(db is not None and 25 < db < 32 for db in seen.values()) > 12


def test_a_damaged_scale_of_an_expert_is_named(sources, tmp_path):
    pack(sources["mixtral"], tmp_path / "packed", experts=True)
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight_scale"
    tensors[name][0] = torch.nan
    save_file(tensors, tmp_path / "packed" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ArtifactError, match=rf"{name} holds inf or NaN"):
        octavo.load(tmp_path / "packed")


def test_an_expert_of_zeros_is_packed_as_zeros(sources, tmp_path):
    """As of an expert that no token ever reached."""
    folder = tmp_path / "source"
    model = open_theirs(sources["mixtral"])
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj[1] = 0
        model.model.layers[0].mlp.experts.down_proj[1] = 0
    model.save_pretrained(folder)
    pack(folder, tmp_path / "packed", experts=True)
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    names = [name for name in tensors if "layers.0." in name and ".experts.1." in name]
    assert len(names) == 6
    assert all(tensors[name].float().isfinite().all() for name in names)
    assert not any(tensors[name].float().any() for name in names if name.endswith(".weight"))
    assert outputs(octavo.load(tmp_path / "packed")).isfinite().all()


def test_a_budget_takes_no_experts(sources, tmp_path):
    with pytest.raises(ValueError, match="a budget chooses among linear layers.*: leave --experts or --budget out"):
        pack_within(sources["mixtral"], tmp_path / "packed", [Budget("kl", 0.1)], ["x"], PackOptions(experts=True))


def test_a_dense_model_has_no_experts(tmp_path):
    with pytest.raises(ValueError, match="has no stacked experts that Octavo packs: leave --experts out"):
        pack(make_model(tmp_path / "llama", "llama"), tmp_path / "packed", experts=True)


def test_experts_in_bf16_are_said_with_their_share_of_the_bytes(sources, tmp_path):
    call = ["pack", str(sources["mixtral"]), str(tmp_path / "plain")]
    said = CliRunner().invoke(app, call).output
    sizes = {name: t.nbytes for name, t in load_file(tmp_path / "plain" / "model.safetensors").items()}
    experts = sum(size for name, size in sizes.items() if is_expert(name))
    folder = sum(file.stat().st_size for file in (tmp_path / "plain").iterdir())
    expected = f"warning: {experts / folder:.0%} of the folder, {experts / 1e6:.2f} MB, are experts in BF16: --experts"
    assert expected in said
    packed = CliRunner().invoke(app, [*call[:2], str(tmp_path / "packed"), "--experts"]).output
    assert "experts in BF16" not in packed


def test_experts_are_not_packed_in_int8(sources, tmp_path):
    with pytest.raises(ValueError, match=r"experts are packed in FP8, not int8 \(--layer '\*\.experts\.\*=channel'\)"):
        pack(sources["mixtral"], tmp_path / "packed", scheme="int8", experts=True)
