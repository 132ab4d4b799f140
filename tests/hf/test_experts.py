"""Mixtures of experts: their files hold a matrix for each projection of each expert, their modules stacks.

Oracles: transformers, which opens every folder here, and the bytes of the source.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from typer.testing import CliRunner

import octavo
from octavo.artifact.files import ArtifactError
from octavo.artifact.packed.reader import PackedTensors
from octavo.hf.source import open_source
from octavo.models.tokenizer import ByteTokenizer
from octavo.packing import pack, unpack
from octavo.runtime.packed_linear import PackedLinear
from octavo.verification import verify
from octavo_cli.app import app

SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 64, "num_experts_per_tok": 2,
    "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
IDS = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(3))
Made = Callable[..., Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """made(kind) is a model, made(kind, scheme=...) a packing of it."""
    root = tmp_path_factory.mktemp("experts")

    def make(kind: str, **how: Any) -> Path:
        folder = root / " ".join([kind, *map(str, how.values())])
        if folder.exists():
            return folder
        if how:
            return pack(make(kind), folder, **how).folder
        torch.manual_seed(0)
        if kind == "mixtral":
            model: Any = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))
        else:
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, moe_intermediate_size=64, num_experts=4))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(torch.randn_like(p) * p.shape[-1] ** -0.5 if p.ndim > 1 and "emb" not in name else p)
        model.bfloat16().save_pretrained(folder)
        ByteTokenizer().save(folder)
        return folder

    return make


def theirs(folder: Path) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(IDS).logits
    return found.double()


def is_expert(name: str) -> bool:
    return ".experts." in name


@pytest.mark.parametrize("kind", ["mixtral", "qwen3moe"])
@pytest.mark.parametrize("how", [{"scheme": "channel"}, {"scheme": "block", "layout": "fp8"}])
def test_a_packed_mixture_opens_here_and_in_transformers(made: Made, kind: str, how: dict[str, str]) -> None:
    source, packed = made(kind), made(kind, **how)
    stored, plain = (load_file(folder / "model.safetensors") for folder in (packed, source))
    experts = {name for name in plain if is_expert(name)}
    assert len(experts) == 2 * 4 * 3
    assert {name for name in stored if is_expert(name)} == experts
    assert all(torch.equal(stored[name], plain[name]) for name in experts)
    model = octavo.load(packed)
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 8
    ours, reference = logits(model), logits(theirs(packed))
    assert float((ours - reference).norm() / reference.norm()) < 0.3  # a router may choose another of two near experts
    report = verify(packed, source)
    assert report.ok, [str(finding) for finding in report.findings]
    assert [c.outcome for c in report.readers] == ["agrees", "agrees", "not run"]


@pytest.mark.parametrize("kind", ["mixtral", "qwen3moe"])
def test_an_unpacked_mixture_is_one_of_transformers(made: Made, kind: str, tmp_path: Path) -> None:
    unpack(made(kind, scheme="channel"), tmp_path / "plain")
    stored, source = (load_file(f / "model.safetensors") for f in (tmp_path / "plain", made(kind)))
    assert stored.keys() == source.keys()
    theirs(tmp_path / "plain")


def test_other_programs_are_told_that_experts_are_not_packed(made: Made) -> None:
    def settings(**how: str) -> Any:
        return json.loads((made("mixtral", **how) / "config.json").read_text())["quantization_config"]

    routers = [f"model.layers.{i}.block_sparse_moe.gate" for i in range(2)]
    experts = [f"model.layers.{i}.block_sparse_moe.experts" for i in range(2)]
    assert settings(scheme="channel")["ignore"] == ["lm_head", r"re:.*\.experts\..*", *routers]
    assert settings(scheme="block", layout="fp8")["modules_to_not_convert"] == ["lm_head", *experts, *routers]


def test_pack_names_experts_with_their_share(made: Made, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["pack", str(made("mixtral")), str(tmp_path / "out")], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    total = sum(t.numel() for t in load_file(made("mixtral") / "model.safetensors").values())
    share = 2 * 4 * 64 * 128 * 2 / total
    assert f"experts.gate_up_proj (expert stack, 2 of [4, 128, 128], {share:.1%}".replace("%", " %") in done.output
    record = json.loads((tmp_path / "out" / "octavo.json").read_text())
    assert record["not_linear"]["model.layers.*.mlp.experts.gate_up_proj"] == pytest.approx(share)


def test_a_missing_expert_is_named(made: Made, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for path in made("mixtral").iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ArtifactError, match=r"block_sparse_moe\.experts\.2\.w3\.weight is missing"):
        open_source(tmp_path / "model")


def pack_experts(folder: Path) -> None:
    """Every linear layer and every expert of a folder in 128 x 128 blocks, as DeepSeek and Qwen pack them."""
    tensors = load_file(folder / "model.safetensors")
    for name, w in list(tensors.items()):
        if w.ndim == 2 and name.endswith("proj.weight"):
            n, k = (-(-size // 128) for size in w.shape)
            scale = torch.empty(n, k)
            for i in range(n):
                for j in range(k):
                    scale[i, j] = w[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].abs().max() / 448
            full = scale.repeat_interleave(128, 0)[: w.shape[0]].repeat_interleave(128, 1)[:, : w.shape[1]]
            tensors[name] = (w.float() / full).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(2))],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def test_packed_experts_of_others_are_listed_and_run_in_bf16(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    for path in made("qwen3moe").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    pack_experts(folder)
    listed = PackedTensors(folder).packing.schemes
    assert sum(map(is_expert, (f"{name}." for name in listed))) == 2 * 4 * 3
    assert {scheme.name for scheme in listed.values()} == {"block"}
    with pytest.warns(UserWarning, match=r"\(24 such layers\) is an expert in FP8: its weight is widened to BF16"):
        model = octavo.load(folder)
    reference = theirs(folder)
    state = reference.state_dict()
    for name, parameter in model.named_parameters():
        if is_expert(f"{name}."):
            assert torch.equal(parameter, state[name]), name
    assert float((logits(model) - logits(reference)).norm() / logits(reference).norm()) < 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = verify(folder, made("qwen3moe"))
    assert report.ok, [str(finding) for finding in report.findings]
    unpack(folder, tmp_path / "plain")
    assert logits(theirs(tmp_path / "plain")).equal(logits(reference))
