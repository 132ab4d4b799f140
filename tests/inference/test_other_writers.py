"""Folders that other programs wrote: every command reads them, and a weight is what its bytes say.

The oracle is the product of bytes and scales in float64 (`other_writers`), and transformers where it opens a folder.
"""

import json
import re
import warnings

import pytest
import torch
from metrics import distance
from other_writers import CACHES, INPUT, WRITERS, know_caches, make_source
from safetensors.torch import load_file
from tiny_models import outputs
from verify_examples import change_tensors, remarks

import octavo
from octavo.checkpoint.packed_folder import PackedTensors
from octavo.checkpoint.scheme import BLOCK, BLOCK_POW2
from octavo.inference.packed_linear import PackedLinear
from octavo.packing import convert_layout, pack, unpack
from octavo.verification import verify


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """written(writer) is a folder and its weights; each is made once."""
    root, weights = tmp_path_factory.mktemp("writers"), {}

    def make(writer):
        if writer not in weights:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the other programs
                weights[writer] = WRITERS[writer](root / writer)
        return root / writer, weights[writer]

    return make


def rounded(x, scale):
    return (x / scale).float().clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale


def cast_input(layer, x):
    """x [T, K] as its scheme rounds it, in float64."""
    x, name = x.double(), layer.scheme.name
    if name == "static":
        return rounded(x, INPUT.double())
    parts = list(x.split({"channel": x.shape[1], "tensor": x.shape[1], "mx": 32}.get(name, 128), 1))
    scales = [part.abs().amax(1, keepdim=True).float().double() / 448 for part in parts]
    if name in ("mx", "block, pow2 inputs"):
        scales = [torch.exp2(scale.log2().ceil()) for scale in scales]
    return torch.cat([rounded(part, scale) for part, scale in zip(parts, scales, strict=True)], 1)


@pytest.mark.filterwarnings("ignore:.*is a scale that Octavo does not use")
@pytest.mark.parametrize("writer", WRITERS)
def test_a_loaded_layer_computes_what_its_bytes_say(written, writer):
    folder, weights = written(writer)
    model = octavo.load(folder)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, PackedLinear)}
    assert layers.keys() == weights.keys()
    for name, layer in layers.items():
        w = layer.scheme.packed_weight(layer.weight, layer.weight_scale).dequantize()
        assert torch.equal(w, weights[name].float()), name
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        x = torch.randn(5, layers[name].in_features, dtype=torch.bfloat16)
        wanted = cast_input(layers[name], x) @ weights[name].t()
        assert distance(layers[name](x), wanted) < 2**-6  # ties of the cast fall either way; another cast is at 0.03
    assert bool(model(torch.arange(9)[None]).logits.isfinite().all())


@pytest.mark.parametrize("writer", WRITERS)
def test_unpacking_and_converting_keep_every_weight(written, writer, tmp_path):
    folder, weights = written(writer)
    blocks = any(scheme in (BLOCK, BLOCK_POW2) for scheme in PackedTensors(folder).packing.schemes.values())
    if blocks:  # the last along K is smaller, which transformers opens in the layout fp8 alone
        with pytest.raises(ValueError, match=r"down_proj: \[128, 192\] is no multiple .* convert to another scheme"):
            convert_layout(folder, tmp_path / "again")
    assert convert_layout(folder, tmp_path / "again", layout="modelopt" if blocks else "compressed-tensors").lossless
    assert "lm_head" in PackedTensors(tmp_path / "again").config["quantization_config"]["ignore"]
    for source, out in ((folder, tmp_path / "plain"), (tmp_path / "again", tmp_path / "plain again")):
        unpack(source, out)
        plain = load_file(out / "model.safetensors")
        assert all(torch.equal(plain[f"{name}.weight"], w.float().bfloat16()) for name, w in weights.items())
        assert not [name for name in plain if "scale" in name or "zero_point" in name]


@pytest.mark.parametrize("writer", CACHES)
def test_scales_of_a_cache_are_read(written, writer):
    found = PackedTensors(written(writer)[0]).kv_scales
    assert list(found) == [f"model.layers.{i}.self_attn" for i in range(2)]
    assert {(float(k), float(v)) for k, v in found.values()} == {CACHES[writer]}


def test_scales_that_are_not_used_are_named(printed, written, tmp_path):
    folder, _ = written("single numbers, outputs' scales, zero points")
    with pytest.warns(UserWarning, match=r"output_scale .* is a scale that Octavo does not use"):
        octavo.load(folder)
    assert len(PackedTensors(folder).unused) == 2 * 2 * 7
    assert "28 scales and zero points that no layer reads" in printed("inspect", folder)
    assert len(unpack(folder, tmp_path / "plain").unused) == 28


# ---- octavo verify


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    make_source(folder := tmp_path_factory.mktemp("model"))
    return folder


@pytest.mark.parametrize(
    ("writer", "readers"),
    [
        ("compressed-tensors FP8 and cache", ["transformers", "octavo"]),
        ("DeepSeek, E8M0", ["transformers", "octavo"]),
        ("Qwen3", ["transformers", "octavo"]),
        ("transformers, static", ["transformers", "octavo"]),
        ("ModelOpt", ["octavo"]),
        ("ModelOpt in config.json", ["octavo"]),
    ],
)
def test_verify_finds_a_right_folder_right(written, source, writer, readers):
    report = verify(written(writer)[0], source)
    assert report.ok, [str(finding) for finding in report.findings]
    assert [reader.name for reader in report.readers if reader.outcome == "agrees"] == readers
    assert remarks(report) == []


@pytest.mark.parametrize(
    ("writer", "failure", "patterns"),
    [
        ("compressed-tensors of 2024", "unexpected_keys", ["has compression_config", "states no quantization_status"]),
        (
            "no status, no ignore, vectors", "ignore_mismatched_sizes",
            ["lacks lm_head, which is in BF16", "states no quantization_status", r"has shape \[128\]"],
        ),
        (
            "single numbers, outputs' scales, zero points", "ignore_mismatched_sizes",
            [r"q_proj.output_scale|output_scale \(", r"has shape \[\]: transformers accepts only \[1\]"],
        ),
        ("cache in k_proj.output_scale", "missing_keys: model.layers.0.self_attn.k_scale", []),
    ],
)  # fmt: skip
def test_verify_says_what_transformers_gets_wrong(written, source, writer, failure, patterns, monkeypatch):
    know_caches(monkeypatch)
    report = verify(written(writer)[0], source)
    outcomes = {reader.name: reader.outcome for reader in report.readers}
    assert (outcomes["transformers"], outcomes["octavo"]) == ("failed", "agrees")
    (finding,) = report.findings
    assert finding.where == "transformers"
    assert failure in finding.message
    found = remarks(report)
    assert len(found) == len(patterns)
    assert all(re.search(pattern, said) for pattern, said in zip(patterns, found, strict=True))


def test_layers_that_transformers_leaves_out_are_left_out(made, tmp_path):
    """DeepSeek-V3's files have a layer more, number 61, that predicts a second token."""
    pack(made("deepseekv3"), folder := tmp_path / "packed", experts=True)
    expected = outputs(octavo.load(folder))
    stored = load_file(folder / "model.safetensors")
    added = {name.replace("layers.1.", "layers.61."): t for name, t in stored.items() if "layers.1." in name}
    change_tensors(folder, lambda tensors: tensors.update(added))
    with pytest.warns(UserWarning, match=rf"layers\.61\..* \({len(added)} such tensors\) has no place in the model"):
        assert torch.equal(outputs(octavo.load(folder)), expected)
    report = verify(folder, made("deepseekv3"))
    assert (report.findings, len(report.remarks)) == ([], 1)


# ---- A folder whose scales are reciprocal: every command that reads it says so


LAYERS = 14


def pack_block(model, out, reciprocal):
    """In the layout fp8 of Hugging Face, whose scales are called `weight_scale_inv` and multiply all the same."""
    pack(model, out, scheme="block", layout="fp8")
    if reciprocal:
        scales = [key for key in load_file(out / "model.safetensors") if key.endswith("_scale_inv")]
        change_tensors(out, lambda tensors: tensors.update({key: 1 / tensors[key] for key in scales}))
    return out


@pytest.mark.parametrize("read", [lambda folder, out: octavo.load(folder), unpack, convert_layout])
def test_what_reads_it_warns(made, tmp_path, read):
    read(pack_block(made("llama"), tmp_path / "right", reciprocal=False), tmp_path / "first")  # a warning is an error
    wrong = pack_block(made("llama"), tmp_path / "wrong", reciprocal=True)
    with pytest.warns(UserWarning, match=rf"wrong: the weight scales of .*\({LAYERS} of {LAYERS} packed layers\) look"):
        read(wrong, tmp_path / "second")


def test_inspect_says_it(printed, made, tmp_path):
    for wrong in (False, True):
        folder = pack_block(made("llama"), tmp_path / f"{wrong}", wrong)
        said, listed = (printed("inspect", folder, *more) for more in ([], ["--json"]))
        assert ("look reciprocal" in said) == wrong
        assert len(json.loads(listed)["reciprocal_scales"]) == LAYERS * wrong


def test_verify_says_it_where_weights_are_not_compared(made, tmp_path):
    assert verify(pack_block(made("llama"), tmp_path / "right", reciprocal=False), made("llama"), folded=True).ok
    report = verify(pack_block(made("llama"), tmp_path / "wrong", reciprocal=True), made("llama"), folded=True)
    [finding] = report.findings
    assert finding.kind == "scale"
    assert "look reciprocal" in finding.message
    assert report.not_run
