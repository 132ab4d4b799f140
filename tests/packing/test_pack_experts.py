"""Mixtures of experts, packed with and without their experts; and layers kept in BF16.

Their files hold a matrix for each projection of each expert, their modules stacks. Oracles: transformers, which opens
every folder here, and the bytes of the source.
"""

import json
import shutil
import warnings
from collections import Counter

import pytest
import torch
from metrics import distance
from packed_examples import LLAMA, lively, write_run
from safetensors.torch import load_file, save_file
from tiny_models import built, make_model, open_theirs, outputs, same_bytes, with_slow, write_text
from verify_examples import change_config, change_settings, change_tensors

import octavo
from octavo.checkpoint.files import ArtifactError, ShardReader
from octavo.checkpoint.packed_folder import PackedTensors
from octavo.evaluation.metrics import Budget
from octavo.evaluation.prompts import PromptOptions
from octavo.inference.packed_experts import PackedGroupedLinear
from octavo.models import Llama, LlamaConfig
from octavo.packing import PackOptions, convert_layout, pack, pack_within, unpack
from octavo.verification import verify

KINDS = ["mixtral", "qwen3moe"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("mixtures")
    sizes = {"moe_intermediate_size": 128, "intermediate_size": 128}
    return {kind: make_model(root / kind, kind, **sizes) for kind in KINDS}


def is_expert(name):
    return ".experts." in name


HOW = {
    "channel": {"scheme": "channel"},
    "block": {"scheme": "block"},
    "fp8": {"scheme": "block", "layout": "fp8"},
    "tensor": {"scheme": "tensor"},
    "int8": {"scheme": "int8", "layers": {"*.experts.*": "channel"}},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_every_reader_opens_packed_experts(sources, tmp_path, kind, how):
    report = pack(sources[kind], tmp_path / "packed", experts=True, **HOW[how])
    assert sum(map(is_expert, report.packed)) == 2 * 4 * 3
    assert [entry.kind for entry in report.not_linear] == [f"matrix of {kind.title().replace('moe', 'Moe')}TopKRouter"]
    assert 0.5 < report.ratio < 0.52
    assert same_stacks(tmp_path / "packed")
    found = verify(tmp_path / "packed", sources[kind])
    assert found.ok, [str(finding) for finding in found.findings]
    # The reference has each bit of transformers' emulation.
    assert found.readers[0].distance == 0 or how in ("fp8", "int8")


@pytest.mark.parametrize("sizes", with_slow([[256, 128], [512, 512], [128, 256], [256, 512]], ([256, 128], [512, 512])))
def test_experts_of_several_blocks_open_in_the_layout_fp8_and_are_refused_in_the_other(tmp_path, sizes):
    """transformers multiplies an expert's weight by its scale element by element; only one block fits."""
    width, hidden = sizes
    made = {"hidden_size": hidden, "intermediate_size": width, "moe_intermediate_size": width, "num_hidden_layers": 1}
    source, out = make_model(tmp_path / "source", "mixtral", **made), tmp_path / "packed"
    said = r"experts\.0\.w1: transformers opens .* --layout fp8, .* by channel \(--layer"
    with pytest.raises(ValueError, match=said):
        pack(source, out, experts=True, scheme="block")
    pack(source, out, experts=True, scheme="block", layout="fp8")
    with pytest.raises(ValueError, match="in the layout fp8 alone"):
        convert_layout(out, tmp_path / "converted")
    assert same_stacks(out)
    pack(source, tmp_path / "mixed", experts=True, scheme="block", layers={"*.experts.*": "channel"})
    assert same_stacks(tmp_path / "mixed")


def test_experts_that_are_linear_layers_of_several_blocks_are_packed_and_converted(made, tmp_path):
    packed = made("switch", scheme="block")
    scale = "encoder.block.1.layer.1.mlp.experts.expert_0.wi.weight_scale"
    assert load_file(packed / "model.safetensors")[scale].shape == (2, 1)
    assert convert_layout(packed, tmp_path / "again").lossless
    assert same_bytes(packed, tmp_path / "again")


def test_each_stack_of_a_run_is_read_once_where_its_experts_are_compared(tmp_path, monkeypatch):
    model, read, get = built("qwen3moe"), Counter(), ShardReader.get
    run = write_run(tmp_path / "run", model, model.config.to_dict(), model="models/qwen3moe")
    pack(run, tmp_path / "packed", experts=True)
    monkeypatch.setattr(ShardReader, "get", lambda reader, name: (read.update([name]), get(reader, name))[1])
    assert verify(tmp_path / "packed", run).ok
    assert {count for name, count in read.items() if name.endswith(("gate_up_proj", "experts.down_proj"))} == {1}


def same_stacks(folder):
    """Whether transformers has the experts of our reader, and about its logits."""
    ours, theirs = octavo.load(folder), open_theirs(folder)
    expected = theirs.state_dict()
    stacks = {name: m for name, m in ours.named_modules() if isinstance(m, PackedGroupedLinear)}
    same = all(torch.equal(m.dequantize(torch.bfloat16), expected[n]) for n, m in stacks.items())
    # Without a GPU, transformers rounds no inputs of experts.
    return len(stacks) > 0 and same and distance(outputs(ours), outputs(theirs)) < 0.3


@pytest.mark.parametrize("how", [{}, {"experts": True, "layers": {"*.experts.*": "channel"}}], ids=["bf16", "fp8"])
def test_a_mixture_in_int8_keeps_its_groups(tmp_path, how):
    pack(make_model(tmp_path / "source", "deepseekv3"), tmp_path / "packed", scheme="int8", **how)
    convert_layout(tmp_path / "packed", tmp_path / "again")
    again, before = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("again", "packed"))
    assert again["quantization_config"]["config_groups"] == before["quantization_config"]["config_groups"]
    assert verify(tmp_path / "again", tmp_path / "source").ok


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
    change_tensors(folder, lambda t: t.pop(f"{name}.weight_scale"))
    change_tensors(folder, lambda t: t.update({f"{name}.weight": plain[f"{name}.weight"]}))
    ignore = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    change_config(folder, ignore=[*ignore, name])
    with pytest.warns(UserWarning, match=r"\(11 such layers\) .* widened to BF16, since other matrices of its stack"):
        model = octavo.load(folder)
    experts = [layer.mlp.experts for layer in model.model.layers]
    assert [type(m).__name__ for m in experts] == ["MixtralExperts", "PackedExperts"]
    assert torch.equal(experts[0].down_proj[2], plain[f"{name}.weight"])
    other = name.replace("experts.2", "experts.1")
    wide = (tensors[f"{other}.weight"].float() * tensors[f"{other}.weight_scale"]).bfloat16()
    assert torch.equal(experts[0].down_proj[1], wide)


def test_the_quality_of_each_expert_is_measured(sources, tmp_path):
    """And an expert that no token reached has no number."""
    pack(sources["qwen3moe"], tmp_path / "packed", experts=True)
    text = [str(write_text(tmp_path / "text"))]
    report = verify(tmp_path / "packed", sources["qwen3moe"], text, prompts=PromptOptions(2, 16))
    seen = {layer.name: layer.output_sqnr for layer in report.layers if is_expert(layer.name)}
    assert len(seen) == 2 * 4 * 3
    assert sum(db is not None and 25 < db < 32 for db in seen.values()) > 12


def test_experts_in_bf16_are_counted(sources, tmp_path):
    report = pack(sources["mixtral"], tmp_path / "plain")
    sizes = {name: t.nbytes for name, t in load_file(tmp_path / "plain" / "model.safetensors").items()}
    assert report.unpacked_expert_bytes == sum(size for name, size in sizes.items() if is_expert(name))
    assert pack(sources["mixtral"], tmp_path / "packed", experts=True).unpacked_expert_bytes == 0


def test_experts_that_cannot_be_packed(sources, tmp_path):
    experts, out = PackOptions(experts=True), tmp_path / "out"
    for act, message in (
        (lambda: pack_within(sources["mixtral"], out, [Budget("kl", 0.1)], ["x"], experts), "leave --experts or"),
        (lambda: pack(make_model(tmp_path / "llama", "llama"), out, experts), "leave --experts out"),
        (lambda: pack(sources["mixtral"], out, experts, scheme="int8"), r"not int8 \(--layer '\*\.experts\.\*=ch"),
    ):
        with pytest.raises(ValueError, match=message):
            act()


# ---- Mixtures whose experts stay in BF16, or were packed by others


def test_other_programs_are_told_that_experts_are_not_packed(made):
    def settings(**how):
        return json.loads((made("mixtral", **how) / "config.json").read_text())["quantization_config"]

    routers = [f"model.layers.{i}.block_sparse_moe.gate" for i in range(2)]
    experts = [f"model.layers.{i}.block_sparse_moe.experts" for i in range(2)]
    assert settings(scheme="channel")["ignore"] == ["lm_head", r"re:.*\.experts\..*", *routers]
    assert settings(scheme="block", layout="fp8")["modules_to_not_convert"] == ["lm_head", *experts, *routers]


def test_pack_names_experts_with_their_share(printed, made, tmp_path):
    out = printed("pack", made("mixtral"), tmp_path / "out")
    total = sum(t.numel() for t in load_file(made("mixtral") / "model.safetensors").values())
    share = 2 * 4 * 64 * 128 * 2 / total
    assert f"experts.gate_up_proj (expert stack, 2 of [4, 128, 128], {share:.1%}".replace("%", " %") in out
    record = json.loads((tmp_path / "out" / "octavo.json").read_text())
    assert record["not_linear"]["model.layers.*.mlp.experts.gate_up_proj"] == pytest.approx(share)


def pack_experts(folder):
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
    theirs = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(2))],
    }  # fmt: skip
    change_settings(folder / "config.json", quantization_config=theirs)


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


# ---- Runs whose early warning moved layers to BF16: they are packed as they ran


ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.0.mlp"
DOWN = f"{MLP}.down_proj"


def promotion(layer, step=5, to="bf16"):
    return {"step": step, "layer": layer, "to": to, "rule": "underflow"}


@pytest.fixture
def run(tmp_path):
    model = lively(Llama(LlamaConfig(**LLAMA)))
    return write_run(tmp_path / "run", model, model.config.to_hf(), recipe="rowwise")


def promote(run, *promotions):
    (run / "actions.json").write_text(json.dumps({"promotions": promotions, "rollbacks": []}))


def test_they_stay_in_bf16_with_those_that_readers_fuse_with_them_unless_they_are_named(run, tmp_path):
    later, narrow = promotion(f"{MLP}.up_proj", step=8), promotion(f"{ATTENTION}.o_proj", to="e5m2")
    promote(run, promotion(DOWN), promotion(f"{ATTENTION}.k_proj", step=7), later, narrow)
    report = pack(run, tmp_path / "packed")
    fused = f"readers fuse it with {ATTENTION}.k_proj, which training moved to BF16"
    expected = {
        DOWN: "training moved it to BF16 at step 5 (underflow)",
        f"{ATTENTION}.q_proj": fused,
        f"{ATTENTION}.k_proj": "training moved it to BF16 at step 7 (underflow)",
        f"{ATTENTION}.v_proj": fused,
    }
    assert {name: why for name, why in report.skipped.items() if name != "lm_head"} == expected
    assert len(report.packed) == 14 - len(expected)
    ignored = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]["ignore"]
    assert expected.keys() <= set(ignored)
    assert pack(run, tmp_path / "asked", layers={DOWN: "channel"}).packed[DOWN] == "channel"


def test_a_run_that_moved_all_its_layers_is_refused(run, tmp_path):
    leaves = [f"self_attn.{leaf}_proj" for leaf in "qkvo"] + [f"mlp.{leaf}_proj" for leaf in ("gate", "up", "down")]
    promote(run, *(promotion(f"model.layers.{i}.{leaf}") for i in range(2) for leaf in leaves))
    said = "every layer .* to BF16: pack an earlier step .--step., or name layers in --layer"
    with pytest.raises(ValueError, match=said):
        pack(run, tmp_path / "packed")


def test_a_damaged_file_of_actions_is_refused(run, tmp_path):
    promote(run, {"layer": DOWN})
    with pytest.raises(ArtifactError, match=r"actions.json is not .* 'to'"):
        pack(run, tmp_path / "packed")
