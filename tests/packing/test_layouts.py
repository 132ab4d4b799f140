"""Layouts and schemes: written, read back, converted, registered, and described in the model card.

The oracle is bytes, for everything that must not change; golden_bytes.json pins what is written.
"""

import json
import math
import re
import shutil
from collections import Counter
from functools import partial

import pytest
import torch
from packed_examples import small_shards
from safetensors.torch import load_file
from tiny_models import make_model, outputs, same_bits, same_bytes
from transformers import AutoModelForCausalLM
from verify_examples import change_config, change_tensors

from octavo.checkpoint.files import ArtifactError, ShardReader
from octavo.checkpoint.layouts import LAYOUTS
from octavo.checkpoint.packed_folder import PackedTensors
from octavo.checkpoint.scheme import SCALE_NAME, SCHEMES, Layout, Scheme
from octavo.inference.opening import load_packed
from octavo.numerics import Cast, group
from octavo.packing import convert_layout, pack, unpack
from octavo.verification import layer_spec, verify
from octavo.verification.layer_spec import cache_scales
from octavo.verification.stored_files import read_files


@pytest.mark.parametrize("cache", [None, "fp8"])
@pytest.mark.parametrize("scheme", ["static", "channel", "block"])
def test_there_and_back_again_changes_no_bit(made, tmp_path, scheme, cache):
    layouts = "compressed-tensors", "modelopt"
    plain, packed = (made("llama", scheme=scheme, layout=name, kv_cache=cache) for name in layouts)
    assert convert_layout(plain, tmp_path / "there", layout="modelopt").lossless
    assert convert_layout(tmp_path / "there", tmp_path / "back").lossless
    assert same_bytes(tmp_path / "there", packed)
    assert same_bytes(tmp_path / "back", plain)
    found, expected = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "there", packed))
    assert found == expected
    assert (tmp_path / "there" / "hf_quant_config.json").exists()
    assert not (tmp_path / "back" / "hf_quant_config.json").exists()
    assert torch.equal(outputs(load_packed(packed).model), outputs(load_packed(plain).model))


def test_one_scale_of_a_cache_for_keys_and_values(made, tmp_path):
    folder = shutil.copytree(made("llama", scheme="static", kv_cache="fp8"), tmp_path / "theirs")
    ours, modelopt = PackedTensors(folder).kv_scales, made("llama", scheme="static", layout="modelopt", kv_cache="fp8")
    assert cache_scales(read_files(folder)) == cache_scales(read_files(modelopt)) == ours
    for name, (k, _) in ours.items():
        change_tensors(folder, lambda t, name=name: [t.pop(f"{name}.{leaf}") for leaf in ("k_scale", "v_scale")])
        change_tensors(folder, lambda t, name=name, k=k: t.update({f"{name}.kv_scale": k}))
    one_scale = {name: (k, k) for name, (k, _) in ours.items()}
    assert PackedTensors(folder).kv_scales == cache_scales(read_files(folder)) == one_scale
    load_packed(folder)
    change_tensors(folder, lambda t: t.pop("model.layers.1.self_attn.kv_scale"))
    assert cache_scales(read_files(folder)) == {}


def config(**settings):
    return lambda folder: change_config(folder, **settings)


def tensors(change):
    return lambda folder: change_tensors(folder, change)


def replaced(name, tensor):
    return tensors(lambda found: found.update({name: tensor}))


W, NAME = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_scale"
K = "model.layers.1.self_attn.k_scale"
FP8 = {"quant_method": "fp8", "weight_block_size": []}
CHANNEL, BLOCK = {"scheme": "channel"}, {"scheme": "block", "layout": "modelopt"}
CACHED, STATIC = CHANNEL | {"kv_cache": "fp8"}, {"scheme": "static", "layout": "modelopt", "kv_cache": "fp8"}


@pytest.mark.parametrize(
    ("how", "damage", "message"),
    [
        (STATIC, config(quant_algo="NVFP4"), "quant_algo is 'NVFP4', octavo runs FP8, FP8_PER_CHANNEL_PER_TOKEN"),
        (STATIC, config(kv_cache_scheme={"num_bits": 4, "type": "float"}), "num_bits is 4, required 8"),
        (STATIC, config(ignore=["re:("]), r"re:\( is not a regular expression, as an entry of quanti"),
        (STATIC, config(ignore=["lm_head", "re:.*up_proj"]), "up_proj.(input_scale has no place|weight is in eight)"),
        (STATIC, config(quant_method="fp8"), "is AutoFP8, and octavo reads the layouts compressed-tensors, fp8, mod"),
        (STATIC, config(**FP8, activation_scheme="token"), "activation_scheme is 'token', required 'dynamic'"),
        (STATIC, config(**FP8 | {"weight_block_size": [64, 64]}), r"size is \[64, 64\], required \[128, 128\]"),
        (CACHED, config(kv_cache_scheme=None), "k_scale has no place in the model"),
        (CACHED, tensors(lambda t: t.pop(K.replace("k_s", "v_s"))), "tensor .*v_scale is missing .*pack it again"),
        (CACHED, tensors(lambda t: t[K].fill_(0)), "self_attn.k_scale must be positive, its least is 0"),
        (CACHED, replaced("model.norm.k_scale", torch.ones(1)), "model.norm.k_scale has no place in the model"),
        (CHANNEL, replaced("k.weight_scale", torch.ones(4, 1)), "k.weight(_scale has no| must be .*it is missing)"),
        (CHANNEL, tensors(lambda t: t.pop(NAME)), "up_proj.weight_scale must be .*, it is missing"),
        (CHANNEL, replaced(NAME, torch.ones(128)), r"weight_scale must be .*\[256, 1\], it is .*\[128, 1\]"),
        (CHANNEL, replaced(NAME, torch.ones(256, 1).double()), "up_proj.* must be .*float32.*it is .*float64"),
        (CHANNEL, replaced(W, torch.ones(256, 128).bfloat16()), "up_proj.* must be .*float8_e4m3fn.*it is .*bfloat16"),
        (CHANNEL, replaced(W, torch.ones(128, 256).to(torch.float8_e4m3fn)), "up_proj.*must be"),
        (BLOCK, replaced(NAME, torch.ones(1, 2, 1, 1)), "up_proj"),
    ],
)
def test_a_folder_that_cannot_be_read(made, tmp_path, how, damage, message):
    folder = shutil.copytree(made("llama", **how), tmp_path / "bad")
    damage(folder)
    for opened, said in ((PackedTensors, message), (load_packed, f"{message}|the folder is damaged or of another")):
        with pytest.raises(ArtifactError, match=said):
            opened(folder)


# ---- A layout and a scheme are objects in a registry: a test registers one of each, and every step works with them


PAIRS = Scheme("group16", Cast(granularity=group(16)), Cast(granularity=group(16)))


class Toy(Layout):
    """A scale [K / 16, N] with a name of its own."""

    name = "toy"
    schemes = (PAIRS.name,)
    readers = "Octavo alone"

    def describe(self, schemes, ignore, kv_cache):
        return {"quant_method": self.name, "group": 16, "ignore": list(ignore)}

    def read(self, found, where):
        return [(["Linear"], PAIRS)]

    def rename(self, name):
        return name.replace(f".{SCALE_NAME}", ".toy_scale")

    def names_in_memory(self, name, kv_cache):
        return [name.replace(".toy_scale", f".{SCALE_NAME}")]


def test_a_scheme_and_a_layout_are_registered(made, tmp_path, monkeypatch):
    monkeypatch.setitem(SCHEMES, PAIRS.name, PAIRS)
    monkeypatch.setitem(LAYOUTS, Toy.name, Toy())
    spec = layer_spec.LayerSpec(1, 16, "token", 16, scale="toy_scale")  # the wall: verification reads it a second time
    monkeypatch.setitem(layer_spec.METHODS, Toy.name, lambda settings: spec)
    plain = pack(made("llama"), tmp_path / "plain", scheme=PAIRS.name).folder
    packed = pack(made("llama"), tmp_path / "toy", scheme=PAIRS.name, layout=Toy.name).folder
    for folder, readers in ((plain, ["transformers", "octavo"]), (packed, ["octavo"])):
        report = verify(folder, made("llama"))
        assert report.ok, [str(finding) for finding in report.findings]
        assert [reader.name for reader in report.readers if reader.outcome == "agrees"] == readers
    assert torch.equal(outputs(load_packed(packed).model), outputs(load_packed(plain).model))
    assert convert_layout(packed, tmp_path / "again").lossless
    with pytest.raises(ValueError, match="toy holds the scheme group16 alone, not channel: --scheme group16"):
        pack(made("llama"), tmp_path / "no", layout=Toy.name)


# ---- Packed folders unpacked, converted and listed; the numbers in float64 from the files' own bytes


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    make_model(root / "bf16", "qwen2", num_hidden_layers=1, tie_word_embeddings=False)
    for scheme in ("channel", "tensor", "block", "mx"):
        pack(root / "bf16", root / scheme, scheme=scheme)
    with small_shards(50_000):
        pack(root / "bf16", root / "mixed", layers={"*.o_proj": "block"}, skip=["*.down_proj"])
    return {path.name: path for path in root.iterdir()}


def wide(folder):
    packed = PackedTensors(folder)
    return {name: packed.weight(name).dequantize(torch.float64) for name in packed.packing.schemes}


@pytest.mark.parametrize("name", ["channel", "tensor", "block", "mx", "mixed"])
def test_unpacked_is_data_times_scale_in_bf16(folders, tmp_path, name, monkeypatch):
    get, read = ShardReader.get, Counter()
    monkeypatch.setattr(ShardReader, "get", lambda reader, name: (read.update([name]), get(reader, name))[1])
    unpack(folders[name], tmp_path / "out")
    assert {count for name, count in read.items() if name.endswith(".weight")} == {1}
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(info.values())
    state, original = model.state_dict(), load_file(folders["bf16"] / "model.safetensors")
    weights = wide(folders[name])
    assert len(weights) == (6 if name == "mixed" else 7)
    for key, weight in weights.items():
        assert torch.equal(state[f"{key}.weight"], weight.bfloat16())
    for key, tensor in original.items():
        if key.removesuffix(".weight") not in weights:
            assert torch.equal(state[key], tensor)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert (tmp_path / "out" / "tokenizer.json").exists() == (folders["bf16"] / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("name", "layout", "scheme"),
    [("block", "fp8", None), ("block", "compressed-tensors", "block"), ("tensor", "compressed-tensors", "channel"),
     ("mixed", "compressed-tensors", None)],
)  # fmt: skip
def test_what_holds_the_same_scales_loses_nothing(folders, tmp_path, name, layout, scheme):
    assert convert_layout(folders[name], tmp_path / "out", layout=layout, scheme=scheme).lossless
    before, after = wide(folders[name]), wide(tmp_path / "out")
    assert same_bits(before, after)
    assert convert_layout(tmp_path / "out", tmp_path / "back").lossless
    if scheme is None and name != "mixed":
        assert same_bytes(tmp_path / "back", folders[name])
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    load_packed(tmp_path / "back")


@pytest.mark.parametrize(
    ("name", "scheme"), [("channel", "block"), ("block", "mx"), ("mx", "channel"), ("channel", "tensor")]
)
def test_what_is_cast_again_states_its_loss(folders, tmp_path, name, scheme):
    result = convert_layout(folders[name], tmp_path / "out", scheme=scheme)
    assert not result.lossless
    before, after = wide(folders[name]), wide(tmp_path / "out")
    for key, db in result.sqnr.items():
        noise = (before[key] - after[key]).square().sum()
        assert db == pytest.approx(float(10 * torch.log10(before[key].square().sum() / noise)), abs=1e-3)
        assert 20 < db < 60
    assert json.loads((tmp_path / "out" / "octavo.json").read_text())["sqnr_db"] == pytest.approx(result.sqnr)
    assert {PackedTensors(tmp_path / "out").packing.schemes[key].name for key in before} == {scheme}


def test_what_cannot_be_converted(folders, tmp_path):
    with pytest.raises(ValueError, match="fp8 holds the scheme block alone, not channel"):
        convert_layout(folders["channel"], tmp_path / "out", layout="fp8")
    with pytest.raises(ValueError, match="static stores the scale of the input, which is not here"):
        convert_layout(folders["channel"], tmp_path / "out", scheme="static")
    for how in ({"layout": "gguf"}, {"scheme": "int4"}):
        with pytest.raises(ValueError, match=f"unknown {next(iter(how))}"):
            convert_layout(folders["channel"], tmp_path / "out", **how)
    for act in (unpack, convert_layout):
        with pytest.raises(ArtifactError, match="has no quantization_config, so the model is not packed"):
            act(folders["bf16"], tmp_path / "out")
        with pytest.raises(FileExistsError):
            act(folders["channel"], folders["mx"])
    assert not list(tmp_path.iterdir())


STRAY = "model.layers.0.mlp.up_proj.pre_quant_scale"  # of ModelOpt, by which inputs are multiplied


@pytest.mark.parametrize("how", [{}, {"scheme": "tensor"}, {"layout": "modelopt"}])
@pytest.mark.parametrize("name", [W, NAME, "model.norm.weight"])
def test_one_nan_or_a_lost_tensor_is_not_repacked(folders, tmp_path, name, how):
    shutil.copytree(folders["channel"], tmp_path / "bad")
    for damage, message in (
        (lambda t: t[name].flatten()[-1:].fill_(math.nan), f"{name} holds inf or NaN; the folder is damaged or of"),
        (lambda t: t.update({STRAY: torch.ones(128)}), f"{STRAY} (of a packed layer is not|has no place)"),
        (lambda t: (t.pop(STRAY), t.pop("model.embed_tokens.weight")), r"embed_tokens.weight is missing \(1 in all\)"),
    ):
        change_tensors(tmp_path / "bad", damage)
        for act in (partial(convert_layout, **how), unpack, lambda folder, _: load_packed(folder)):
            with pytest.raises(ArtifactError, match=message):
                act(tmp_path / "bad", tmp_path / "out")
    shutil.copyfile(folders["channel"] / "octavo.json", tmp_path / "bad" / "octavo.json")  # which lists what is lost
    with pytest.raises(ArtifactError, match=r"embed_tokens.weight is missing \(1 in all\)"):
        unpack(tmp_path / "bad", tmp_path / "out")
    shutil.copytree(folders["channel"], tmp_path / "longer")
    config = json.loads((tmp_path / "longer" / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    (tmp_path / "longer" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"layers.1.input_layernorm.weight is missing \(12 in all\)"):
        unpack(tmp_path / "longer", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- the command line


def test_commands(printed, folders, tmp_path):
    listed = json.loads(printed("inspect", folders["mixed"], "--json"))
    assert listed["layout"] == "compressed-tensors"
    rows = {row["tensor"]: row for row in listed["tensors"]}
    o_proj = rows["model.layers.0.self_attn.o_proj.weight"]
    assert (o_proj["scheme"], o_proj["scales"], o_proj["bytes"]) == ("block", 1, 128 * 128 + 4)
    weight = load_file(folders["bf16"] / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
    assert o_proj["largest"] == pytest.approx(float(weight.abs().max()) / 448)
    assert rows["model.layers.0.mlp.down_proj.weight"]["dtype"] == "bfloat16"
    assert listed["bytes"] == sum(row["bytes"] for row in listed["tensors"])
    assert "6 layers packed, 2 linear layers in BF16" in printed("inspect", folders["mixed"])
    printed("unpack", folders["block"], tmp_path / "int8", "--scheme", "int8")
    integers = json.loads(printed("inspect", tmp_path / "int8", "--json"))["tensors"]
    assert {row["dtype"] for row in integers if "scheme" in row} == {"int8"}
    assert "no weight changed" in printed("unpack", folders["block"], tmp_path / "hf", "--layout", "fp8")
    lossy = printed("unpack", tmp_path / "hf", tmp_path / "mx", "--scheme", "mx")
    assert re.search("7 of 7 weights were cast again.* dB, lowest ", lossy)
    printed("unpack", tmp_path / "mx", tmp_path / "plain")
    assert math.isfinite(float(load_file(tmp_path / "plain" / "model.safetensors")["model.norm.weight"].sum()))


# ---- The model card of a packed folder: what it says works, and the card of the model stays


OWN = "---\nlicense: apache-2.0\nbase_model: org/llama\n---\n# Llama\n\nIts own words.\n"


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("llama", {}),
        ("llama", {"scheme": "block", "layout": "fp8"}),
        ("llama", {"scheme": "channel", "layout": "modelopt"}),
        ("llama", {"scheme": "group64"}),
        ("bert", {"scheme": "int8"}),
        ("llama4", {}),  # transformers expects other experts there, as `verify` shows
    ],
    ids=str,
)
def test_its_commands_open_the_folder(octavo, printed, made, tmp_path, monkeypatch, kind, how):
    said = printed("pack", made(kind), tmp_path / "packed", *(f"--{key}={value}" for key, value in how.items()))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(bash|python)\n(.*?)\n```", (tmp_path / "packed" / "README.md").read_text(), re.DOTALL)
    (python,) = (text for language, text in blocks if language == "python")
    exec(python, {})
    assert ("transformers" in python) == (how.get("layout") != "modelopt" and kind != "llama4")
    assert ("transformers" in python) == (not re.search(r"^for .*: transformers", said, re.MULTILINE))
    shell = [line for language, text in blocks if language == "bash" for line in text.splitlines()]
    assert ("vllm serve packed" in shell) == (kind != "bert" and how.get("scheme") != "group64")
    commands = [line.split()[1:] for line in shell if line.startswith("octavo ")]
    assert [words[:2] for words in commands] == [["generate", "packed"]] * (kind != "bert")
    for words in commands:
        assert octavo(*(word.strip('"') for word in words), "--count", "2")[0] == 0


def test_the_card_of_the_model_follows_with_its_front_matter(made, tmp_path):
    pack(made("llama"), tmp_path / "plain")
    assert (tmp_path / "plain" / "README.md").read_text().startswith("---\ntags: [")
    source = shutil.copytree(made("llama"), tmp_path / "source")
    (source / "README.md").write_text(OWN)
    pack(source, tmp_path / "packed", scheme="block")
    convert_layout(tmp_path / "packed", tmp_path / "again", layout="fp8")
    for name, layout in (("packed", "compressed-tensors"), ("again", "fp8")):
        card = (tmp_path / name / "README.md").read_text()
        assert card.startswith(OWN.partition("# ")[0])
        assert card.endswith("# Llama\n\nIts own words.\n")
        assert card.count("Packed in eight bits by Octavo") == 1
        assert f"14 by `block`, in the layout {layout}" in card
