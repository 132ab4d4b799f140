"""Folders of transformers with torchao's weights in E4M3, against torchao's own tensors and the files' bytes."""

import shutil

import pytest
import torch
from adapter_oracle import check_layers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tiny_models import make_model
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, Float8WeightOnlyConfig, PerRow, PerTensor
from transformers import AutoModelForCausalLM, TorchAoConfig
from verify_examples import change_config, change_tensors

import octavo
from octavo.checkpoint.files import ArtifactError
from octavo.integrations.peft import support
from octavo.packing import unpack
from octavo.verification import verify

CONFIGS = {
    "channel": Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
    "tensor": Float8DynamicActivationFloat8WeightConfig(granularity=PerTensor()),
    "weight": Float8WeightOnlyConfig(),
}
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A BF16 model, and what transformers and torchao make of it."""
    root = tmp_path_factory.mktemp("torchao")
    make_model(root / "bf16", "llama", num_hidden_layers=1)
    with pytest.MonkeyPatch.context() as patch:
        # torchao writes it on a GPU alone
        patch.setattr("torchao.quantization.quant_api._check_hardware_support", lambda granularity: None)
        for name, config in CONFIGS.items():
            options = {"quantization_config": TorchAoConfig(config), "dtype": torch.bfloat16}
            model = AutoModelForCausalLM.from_pretrained(root / "bf16", **options)
            model.save_pretrained(root / name, max_shard_size="60KB" if name == "channel" else "5GB")
            weights = {key: p.dequantize() for key, p in model.state_dict().items() if hasattr(p, "qdata")}
            torch.save(weights, root / f"{name}.pt")
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize("scheme", CONFIGS)
def test_adapters_around_them_have_their_gradients(folders, scheme):
    stored = torch.load(folders[f"{scheme}.pt"])
    weights = {name.removesuffix(".weight"): w for name, w in stored.items()}
    config = support(LoraConfig(r=4, target_modules=list({name.rpartition(".")[2] for name in weights})))
    check_layers(get_peft_model(octavo.load(folders[scheme]), config), weights)


@pytest.mark.parametrize("scheme", CONFIGS)
def test_loaded_and_unpacked_weights_are_those_of_torchao(folders, tmp_path, scheme):
    model = octavo.load(folders[scheme])
    assert {m.scheme.name for m in model.modules() if hasattr(m, "scheme")} == {scheme}
    unpack(folders[scheme], tmp_path / "wide")
    theirs, wide = torch.load(folders[f"{scheme}.pt"]), load_file(tmp_path / "wide" / "model.safetensors")
    assert len(theirs) == 7
    assert all(torch.equal(wide[name], weight) for name, weight in theirs.items())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    with torch.no_grad():
        found, expected = (m(torch.arange(24)[None]).logits.float() for m in (model, plain))
    error = (found - expected).square().mean() / expected.square().mean()
    assert error < (1e-3 if scheme == "weight" else 1e-2)  # in FP8 inputs are rounded too


@pytest.mark.parametrize("scheme", CONFIGS)
def test_verify_reads_it(folders, tmp_path, scheme):
    report = verify(folders[scheme], folders["bf16"])
    assert report.ok, report.findings
    assert [layer.spec for layer in report.layers] == ["tensor, input tensor" if scheme == "tensor" else scheme] * 7
    assert all(layer.weight_sqnr > 25 for layer in report.layers)
    outcomes = [(each.name, each.outcome) for each in report.readers]
    assert outcomes[:2] == [("transformers", "not run"), ("octavo", "agrees")]
    assert octavo.check(octavo.load(folders[scheme]), folders[scheme]).ok
    if scheme != "channel":
        bad = shutil.copytree(folders[scheme], tmp_path / "bad")
        change_tensors(bad, lambda tensors: tensors[f"{UP}._weight_scale"].mul_(2))
        (finding,) = verify(bad, folders["bf16"]).findings
        assert (finding.kind, finding.where) == ("weights", f"{UP}.weight")


PLAIN = {"_type": "Float8WeightOnlyConfig", "_data": {}}


@pytest.mark.parametrize(
    ("quant_type", "message"),
    [
        ({"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}}, "quant_type is Int4WeightOnlyConfig, .*; octavo"),
        ({"default": PLAIN, "layers": {}}, "quant_type is None, .*; octavo reads one Float8Dynamic"),
        ({"default": PLAIN | {"_data": {"weight_dtype": {"_data": "float8_e5m2"}}}}, "float8_e5m2, .* in float8_e4m3"),
        ({"default": PLAIN | {"_data": {"granularity": {"_type": "PerBlock"}}}}, "PerBlock, .*; octavo reads one"),
        ({"default": PLAIN | {"_data": {"activation_value_ub": 2.0}}}, r"bounds \[None, 2.0\]"),
        ("int8", "quant_type is None"),
    ],
)
def test_another_configuration_of_torchao_is_refused(folders, tmp_path, quant_type, message):
    folder = shutil.copytree(folders["weight"], tmp_path / "bad")
    change_config(folder, quant_type=quant_type)
    with pytest.raises(ArtifactError, match=message):
        octavo.load(folder)


@pytest.mark.parametrize("gathered", [False, True])
def test_layers_that_torchao_converted_are_named_and_restored(gathered):
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 16, bias=False))
    state, x = {name: t.clone() for name, t in model.state_dict().items()}, torch.randn(16, 64)
    expected = model(x)
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=gathered, emulate=True))
    said = r"0: torchao converted it \(Float8Linear\): octavo.restore\(model\) makes it an"
    with pytest.raises(ValueError, match=said):
        octavo.convert(model)
    assert octavo.restore(model) == ["0", "1"]
    assert all(type(layer) is nn.Linear and layer.__dict__.keys() == nn.Linear(1, 1).__dict__.keys() for layer in model)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert all(type(p) is nn.Parameter and type(p.data) is torch.Tensor for p in model.parameters())
    assert torch.equal(model(x), expected)
    assert octavo.convert(model).converted == ["0", "1"]
