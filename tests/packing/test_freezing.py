"""Stored scales, of inputs from a warm-up and of a KV cache, against calibrations and other readers."""

import json
from contextlib import contextmanager

import pytest
import torch
from metrics import distance
from other_writers import know_caches
from packed_examples import LLAMA, write_run
from safetensors.torch import load_file
from tiny_models import IDS, make_model, open_theirs, outputs, same_bytes, write_text
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import octavo
from octavo.calibration import calibrate
from octavo.checkpoint.layouts import read_config
from octavo.checkpoint.packed_folder import PackedTensors
from octavo.evaluation.prompts import PromptOptions, open_prompts
from octavo.hf.meta_model import read_meta_model
from octavo.inference.opening import load_packed
from octavo.inference.transformers_cache import CACHE, QuantizedKVCache
from octavo.models import Llama, LlamaConfig
from octavo.packing import PackOptions, convert_layout, freeze_folder, pack, pack_frozen, unpack

PROMPTS = PromptOptions(16, 64)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return [str(write_text(tmp_path_factory.mktemp("data") / "text.txt"))]


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "bf16", "qwen2", num_hidden_layers=1)


def stored(folder):
    return load_file(folder / "model.safetensors")


def batches(folder, data):
    return open_prompts(data, folder, PROMPTS, read_meta_model(read_config(folder), folder)).batches(PROMPTS.batch)


@pytest.mark.parametrize("name", ["qwen2", "bert masked"])  # in the head of the latter is a layer that is packed
def test_a_model_folder_gets_the_scales_of_a_calibration(made, data, tmp_path, name):
    """A calibration runs the model block by block, a warm-up as a whole: the same bytes and scales."""
    calibrate(made(name), data, tmp_path / "calibrated", prompts=PROMPTS)
    pack(made(name), tmp_path / "expected", scheme="static", calibration=tmp_path / "calibrated")
    assert set(pack_frozen(made(name), tmp_path / "out", data, prompts=PROMPTS).packed.values()) == {"static"}
    assert same_bytes(tmp_path / "out", tmp_path / "expected")
    record = json.loads((tmp_path / "out" / "octavo.json").read_text())
    assert record["calibration"] == {"rule": "frozen"}
    assert (record["warm_up"]["prompts"], record["warm_up"]["context"]) == (9, 64)


def test_a_run_that_was_not_trained_with_delayed_is_frozen(data, tmp_path):
    model = Llama(LlamaConfig(**LLAMA))
    run = write_run(tmp_path / "run", model, model.config.to_hf(), skip=("*.down_proj",))
    report = pack_frozen(run, tmp_path / "out", data, prompts=PROMPTS)
    assert not [name for name in report.packed if name.endswith("down_proj")]
    assert "model.layers.0.mlp.up_proj.input_scale" in stored(tmp_path / "out")
    assert distance(outputs(load_packed(tmp_path / "out").model), outputs(open_theirs(tmp_path / "out"))) < 0.05


@pytest.mark.parametrize("scheme", ["channel", "tensor", "block"])
def test_a_packed_folder_is_frozen_as_its_model_in_memory(bf16, data, tmp_path, scheme):
    pack(bf16, tmp_path / "packed", scheme=scheme)
    result = freeze_folder(tmp_path / "packed", tmp_path / "out", data, prompts=PROMPTS)
    assert result.lossless == (scheme == "tensor")
    model = octavo.load(tmp_path / "packed")
    scales = octavo.scales.freeze_scales(model, batches(bf16, data))
    found = PackedTensors(tmp_path / "out")
    written = {name: float(found.input_scale(name)) for name in found.packing.schemes}
    assert written == {name: float(scale) for name, scale in scales.items()}
    assert torch.equal(outputs(model), outputs(octavo.load(tmp_path / "out")))
    clipped = octavo.scales.saturation(model, batches(bf16, data))
    assert clipped.keys() == scales.keys()
    assert max(clipped.values()) < 1e-4  # not 0: static layers give the layers after them other inputs
    assert distance(outputs(model.float()), outputs(open_theirs(tmp_path / "out", torch.float32))) < 1e-2
    with pytest.raises(ValueError, match="has no layer whose scales can be frozen"):
        octavo.scales.freeze_scales(model, batches(bf16, data))


def test_scales_of_a_converted_model_are_packed(bf16, data, tmp_path):
    model = open_theirs(bf16)
    cast = octavo.Cast(granularity=octavo.numerics.Granularity(None, None), history=octavo.numerics.History())
    octavo.convert(model, octavo.Recipe("no margin", *[octavo.Gemm(cast, cast)] * 3))
    scales = octavo.scales.freeze_scales(model, batches(bf16, data))
    pack(bf16, tmp_path / "out", input_scales=scales, share=False)
    packed = stored(tmp_path / "out")
    for name, scale in scales.items():
        assert torch.equal(packed[f"{name}.input_scale"], scale)
    assert distance(outputs(model.eval()), outputs(load_packed(tmp_path / "out").model)) < 1e-2


def test_what_cannot_be_frozen(made, bf16, data, tmp_path):
    out = tmp_path / "out"
    pack_frozen(bf16, tmp_path / "static", data, prompts=PROMPTS)
    pack(bf16, tmp_path / "packed")
    cache = {"kv_cache": "fp8", "calibration": made("bert", "calibrated")}
    for act, message in (
        (lambda: freeze_folder(tmp_path / "static", out, data), "stores the scales of its inputs already"),
        (lambda: convert_layout(tmp_path / "packed", out, scheme="static"), r"warm the model up on text \(--freeze\)"),
        (lambda: pack_frozen(bf16, out, data, PackOptions(scheme="channel")), "only the scheme static .* channel is g"),
        (lambda: pack(made("bert"), out, **cache), "has no attention layers with k_proj"),
    ):
        with pytest.raises(ValueError, match=message):
            act()
    assert not out.exists()


def test_the_commands(printed, refused, bf16, data, tmp_path):
    freeze = ("--freeze", 4, "--data", *data)
    assert "7, static" in printed("pack", bf16, tmp_path / "one", *freeze)
    printed("pack", bf16, tmp_path / "packed", "--scheme", "tensor")
    assert "no weight changed" in printed("unpack", tmp_path / "packed", tmp_path / "two", *freeze)
    one, two = stored(tmp_path / "one"), stored(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(float(two[n] / one[n] - 1) < 0.2 for n in one if n.endswith("input_scale"))
    for words, message in (
        (("pack", bf16, tmp_path / "x", "--freeze", 4), "--freeze runs the model on text"),
        (("pack", bf16, tmp_path / "x", *freeze, "--budget", "kl=1"), "--budget and --freeze both run the model"),
        (("unpack", tmp_path / "packed", tmp_path / "x", *freeze, "--scheme", "block"), "only the scheme static has"),
    ):
        assert message in refused(*words)


# ---- The scales of a KV cache: written, read back, and refused where they are damaged


ATTENTION = "model.layers.1.self_attn"


@contextmanager
def rounded_cache(model, scales, dtype=None):
    """Attention of transformers' whose keys and values went through e4m3, written down without any library.

    The arithmetic is that of `dtype`, or of the keys.
    """

    def rounded(x, scale):
        return ((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(scale.dtype) * scale).to(x.dtype)

    names = {id(module): name for name, module in model.named_modules()}
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(module, query, key, value, *args, **kwargs):
        k, v = (scale.to(dtype or key.dtype) for scale in scales[names[id(module)]])
        return sdpa(module, query, rounded(key, k), rounded(value, v), *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS["rounded"] = attention
    AttentionMaskInterface.register("rounded", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("rounded")
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def test_our_cache_takes_the_scales_of_a_folder(made):
    """Token by token, so that all but the newest key and value are read from the cache."""
    folder = made("llama", scheme="channel", kv_cache="fp8")
    model = octavo.load(folder).float()
    unrounded = outputs(model)
    with rounded_cache(model, PackedTensors(folder).kv_scales):
        required = outputs(model)
    cache = QuantizedKVCache.for_model(model, 32, "fp8", scales=PackedTensors(folder).kv_scales)
    with torch.no_grad():
        steps = [model(ids, **{CACHE: cache}, use_cache=True).logits for ids in torch.split(IDS, 1, 1)]
    assert distance(torch.cat(steps, 1).double(), required) < 0.1 * distance(unrounded, required)


@pytest.mark.parametrize("scheme", ["channel", "static", "mx"])
def test_a_cache_goes_with_every_scheme(made, tmp_path, scheme):
    folder, plain = made("llama", scheme=scheme, kv_cache="fp8"), made("llama", scheme=scheme)
    stored, without = (load_file(path / "model.safetensors") for path in (folder, plain))
    names = {f"model.layers.{i}.self_attn.{x}_scale" for i in range(2) for x in "kv"}
    assert stored.keys() - without.keys() == names
    assert all(stored[name].shape == (1,) and stored[name].dtype == torch.float32 for name in names)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    expected = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    assert config["kv_cache_scheme"] == expected
    assert json.loads((folder / "octavo.json").read_text())["calibration"]["kv_cache"] == "fp8"
    assert torch.equal(*(outputs(load_packed(path).model) for path in (folder, plain)))  # a forward pass has no cache
    assert convert_layout(folder, tmp_path / "again").lossless
    assert same_bytes(folder, tmp_path / "again")
    unpack(folder, tmp_path / "plain")
    open_theirs(tmp_path / "plain")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_transformers_rounds_by_scales_in_bf16_where_the_model_is_in_bf16(made, monkeypatch):
    """So logits differ from those of the exact scales, as docs/packing.md says; in float32 they do not."""
    know_caches(monkeypatch)
    folder, plain = made("llama", scheme="mx", kv_cache="fp8"), open_theirs(made("llama", scheme="mx"), torch.bfloat16)
    found, scales = outputs(open_theirs(folder, torch.bfloat16)), PackedTensors(folder).kv_scales
    with rounded_cache(plain, scales):
        assert distance(found, outputs(plain)) < 1e-6
    with rounded_cache(plain, scales, torch.float32):
        assert 0.01 < distance(found, outputs(plain)) < 0.3
