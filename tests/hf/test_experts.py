"""Mixtures of experts: their files hold a matrix for each projection of each expert, their modules stacks.

Oracles: transformers, which opens every folder here, and the bytes of the source.
"""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from metrics import distance
from safetensors.torch import load_file, save_file
from tiny_models import open_theirs, outputs
from typer.testing import CliRunner
from verify_examples import change_tensors

import octavo
from octavo.checkpoint.files import ArtifactError
from octavo.checkpoint.packed_folder import PackedTensors
from octavo.hf.source import open_source
from octavo.packing import unpack
from octavo.verification import verify
from octavo_cli.app import app


def is_expert(name: str) -> bool:
    return ".experts." in name


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, {"scheme": "channel"}) for kind in ("mixtral", "qwen3moe")),
        *((kind, {"scheme": "block", "layout": "fp8"}) for kind in ("mixtral", "qwen3moe")),
        *((kind, {"scheme": "int8"}) for kind in ("mixtral", "qwen3moe", "deepseekv3")),
    ],
)
def test_a_packed_mixture_opens_here_and_in_transformers(made, tmp_path, kind, how):
    source, packed = made(kind), made(kind, **how)
    stored, plain = (load_file(folder / "model.safetensors") for folder in (packed, source))
    experts = {name for name in plain if is_expert(name)}
    assert {name for name in stored if is_expert(name)} == experts != set()
    assert all(torch.equal(stored[name], plain[name]) for name in experts)
    ours, reference = outputs(octavo.load(packed)), outputs(open_theirs(packed))
    assert distance(ours, reference) < 0.3  # a router may choose another of two near experts
    report = verify(packed, source)
    assert report.ok, [str(finding) for finding in report.findings]
    assert [c.outcome for c in report.readers] == ["agrees", "agrees", "not run"]
    unpack(packed, tmp_path / "plain")
    assert load_file(tmp_path / "plain" / "model.safetensors").keys() == plain.keys()
    open_theirs(tmp_path / "plain")


def test_other_programs_are_told_that_experts_are_not_packed(made):
    def settings(**how: str) -> Any:
        return json.loads((made("mixtral", **how) / "config.json").read_text())["quantization_config"]

    routers = [f"model.layers.{i}.block_sparse_moe.gate" for i in range(2)]
    experts = [f"model.layers.{i}.block_sparse_moe.experts" for i in range(2)]
    assert settings(scheme="channel")["ignore"] == ["lm_head", r"re:.*\.experts\..*", *routers]
    assert settings(scheme="block", layout="fp8")["modules_to_not_convert"] == ["lm_head", *experts, *routers]


def test_pack_names_experts_with_their_share(made, tmp_path):
    done = CliRunner().invoke(app, ["pack", str(made("mixtral")), str(tmp_path / "out")], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    total = sum(t.numel() for t in load_file(made("mixtral") / "model.safetensors").values())
    share = 2 * 4 * 64 * 128 * 2 / total
    assert f"experts.gate_up_proj (expert stack, 2 of [4, 128, 128], {share:.1%}".replace("%", " %") in done.output
    record = json.loads((tmp_path / "out" / "octavo.json").read_text())
    assert record["not_linear"]["model.layers.*.mlp.experts.gate_up_proj"] == pytest.approx(share)


def test_a_missing_expert_is_named(made, tmp_path):
    model = shutil.copytree(made("mixtral"), tmp_path / "model")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    change_tensors(model, lambda tensors: tensors.pop(name))
    with pytest.raises(ArtifactError, match=rf"{name} is missing"):
        open_source(model)


def pack_experts(folder: Path) -> None:
    """Every linear layer and every expert of a folder in 128 x 128 blocks, as DeepSeek and Qwen pack them."""
    tensors = load_file(folder / "model.safetensors")
    for name, w in list(tensors.items()):
        if w.ndim == 2 and name.endswith("proj.weight"):
            n, k = (-(-size // 128) for size in w.shape)
            blocks = [[w[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] for j in range(k)] for i in range(n)]
            scale = torch.tensor([[float(block.abs().max()) for block in row] for row in blocks]) / 448
            full = scale.repeat_interleave(128, 0)[: w.shape[0]].repeat_interleave(128, 1)[:, : w.shape[1]]
            tensors |= {name: (w.float() / full).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(2))],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def test_packed_experts_of_others_are_listed_and_run_in_bf16(made, tmp_path):
    folder = shutil.copytree(made("qwen3moe"), tmp_path / "theirs")
    pack_experts(folder)
    listed = PackedTensors(folder).packing.schemes
    assert sum(map(is_expert, (f"{name}." for name in listed))) == 2 * 4 * 3
    assert {scheme.name for scheme in listed.values()} == {"block"}
    with pytest.warns(UserWarning, match=r"\(24 such layers\) is an expert in FP8: its weight is widened to BF16"):
        model = octavo.load(folder)
    reference = open_theirs(folder)
    state = reference.state_dict()
    for name, parameter in model.named_parameters():
        if is_expert(f"{name}."):
            assert torch.equal(parameter, state[name]), name
    assert distance(outputs(model), outputs(reference)) < 0.15  # without a GPU, transformers rounds no inputs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = verify(folder, made("qwen3moe"))
    assert report.ok, [str(finding) for finding in report.findings]
    unpack(folder, tmp_path / "plain")
    assert outputs(open_theirs(tmp_path / "plain")).equal(outputs(reference))


def test_more_experts_a_token_than_there_are_is_an_error(made, tmp_path):
    config = json.loads((made("mixtral") / "config.json").read_text()) | {"num_experts_per_tok": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"config\.json: num_experts_per_tok must be at most .*, got 5 of 4"):
        open_source(tmp_path)
