"""Folders that llm-compressor itself wrote, where it is installed: `make test-compressor`.

Oracles: compressed-tensors, which widens every weight of the folder, and transformers' outputs.
"""

import json
import warnings

import pytest
import torch
from other_writers import spread
from safetensors.torch import load_file
from tiny_models import make_model
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from verify_examples import remarks

import octavo
from octavo.checkpoint.packed_folder import PackedTensors
from octavo.inference.packed_linear import PackedLinear
from octavo.models.tokenizer import ByteTokenizer
from octavo.packing import convert_layout, unpack
from octavo.verification import verify

pytest.importorskip("llmcompressor")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the other program

CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
SCHEMES = {
    "FP8": ({"scheme": "FP8"}, "static", (1,)),
    "FP8_DYNAMIC": ({"scheme": "FP8_DYNAMIC"}, "channel", (256, 1)),
    "FP8_BLOCK": ({"scheme": "FP8_BLOCK"}, "block", (2, 1)),
    "INT8": ({"scheme": "INT8"}, "int8", (256, 1)),
    "FP8_KV": ({"scheme": "FP8", "kv_cache_scheme": CACHE}, "static", (1,)),
}
IDS = torch.arange(40)[None]
UP = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """made("BF16") is a model, made(scheme) what llm-compressor makes of it."""
    root = tmp_path_factory.mktemp("llmcompressor")

    def make(name):
        folder = root / name
        if folder.exists():
            return folder
        if name == "BF16":
            return make_model(folder, "llama")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the other program
            how = {"scheme": "FP8_DYNAMIC", "actorder": None} if name == "GPTQ" else SCHEMES[name][0]
            compress(make("BF16"), folder, how)
        return folder

    return make


def compress(source, out, how):
    """What its users run: oneshot with a modifier, and save_pretrained."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    ids = torch.randint(256, (8, 32), generator=torch.Generator().manual_seed(1)).tolist()
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * 32] * 8})
    modifier = GPTQModifier if out.name == "GPTQ" else QuantizationModifier
    recipe = modifier(targets="Linear", ignore=["lm_head"], **how)
    oneshot(model=model, dataset=data, recipe=recipe, num_calibration_samples=8, max_seq_length=32)
    model.save_pretrained(out, save_compressed=True)
    ByteTokenizer().save(out)


def widened(folder):
    """The weights as compressed-tensors widens them when transformers opens the folder."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    return dict(model.state_dict())


@pytest.mark.parametrize("name", SCHEMES)
def test_its_folders_are_read(made, name, tmp_path):
    folder, (_, scheme, shape) = made(name), SCHEMES[name]
    stored = load_file(folder / "model.safetensors")
    assert stored[f"{UP}.weight_scale"].dtype == torch.bfloat16  # what was called damaged
    assert stored[f"{UP}.weight_scale"].shape == shape
    packed = PackedTensors(folder)
    assert {how.name for how in packed.packing.schemes.values()} == {scheme}
    assert len(packed.packing.schemes) == 14
    assert len(packed.kv_scales) == (2 if name == "FP8_KV" else 0)
    reference = widened(folder)
    model = octavo.load(folder)
    layers = {key: m for key, m in model.named_modules() if isinstance(m, PackedLinear)}
    assert len(layers) == 14
    for key, layer in layers.items():
        w = layer.scheme.packed_weight(layer.weight, layer.weight_scale).dequantize()
        exact = stored[f"{key}.weight"].double() * spread(stored[f"{key}.weight_scale"], tuple(w.shape))
        assert torch.equal(w.double(), exact)
        # Theirs multiplies in BF16, the dtype of the scale.
        assert torch.allclose(w, reference[f"{key}.weight"], rtol=2**-7, atol=0)
    unpack(folder, tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert torch.equal(plain[f"{UP}.weight"], packed.weight(UP).dequantize(torch.bfloat16))
    assert convert_layout(folder, tmp_path / "again").lossless
    assert torch.equal(octavo.load(tmp_path / "again")(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("name", SCHEMES)
def test_verify_finds_them_right(made, name):
    report = verify(made(name), made("BF16"))
    assert report.ok, [str(finding) for finding in report.findings]
    outcomes = {reader.name: reader.outcome for reader in report.readers}
    assert (outcomes["transformers"], outcomes["octavo"]) == ("agrees", "agrees")
    assert remarks(report) == []


def test_bytes_that_gptq_chose_are_counted(made):
    """GPTQ rounds an element up or down so that the errors of a row cancel on its inputs."""
    report = verify(made("GPTQ"), made("BF16"))
    assert report.ok, [str(finding) for finding in report.findings]
    (remark,) = remarks(report)
    assert "bytes are not MODEL's weight / scale rounded to nearest" in remark


def test_inspect_lists_them(octavo, made):
    code, out, err = octavo("inspect", made("FP8_KV"), "--json")
    assert code == 0, err
    rows = {row["tensor"]: row for row in json.loads(out)["tensors"]}
    assert rows[f"{UP}.weight"]["scheme"] == "static"
    assert rows["model.layers.0.self_attn.k_scale"]["scheme"] == "kv cache"
