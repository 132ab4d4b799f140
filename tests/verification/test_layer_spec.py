"""The reference of verification: the settings of several writers, the numbers they stand for, and the quality."""

import shutil
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import apply, initialize
from compressed_tensors.quantization.lifecycle.forward import quantize as theirs_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from metrics import sqnr
from other_writers import know_caches
from quality import compare
from safetensors.torch import load_file
from tiny_models import TEXT, open_theirs, outputs, with_slow
from verify_examples import change_tensors, run_verify

from octavo.evaluation.metrics import EmbeddingSums, Estimate, LogitQuality
from octavo.packing import pack
from octavo.rates.measured import measured_speeds
from octavo.verification.findings import LayerReport, Report
from octavo.verification.layer_spec import LayerSpec, SpecError, read_specs, round_input

EIGHT = {"num_bits": 8, "type": "float", "symmetric": True}
NAMES = ["a.q_proj", "a.gate", "lm_head"]


def one(settings, name="a.q_proj"):
    return read_specs(settings, NAMES)[0][name]


def compressed(weights, inputs, **more):
    group = {"targets": ["Linear"], "weights": EIGHT | weights, "input_activations": inputs and EIGHT | inputs}
    return {
        "quant_method": "compressed-tensors", "format": f"{(EIGHT | weights)['type']}-quantized",
        "quantization_status": "compressed", "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    } | more  # fmt: skip


def test_a_quantization_without_a_name_is_described():
    assert str(one(compressed({"strategy": "group", "group_size": 64}, None))) == "1x64, input none"
    dynamic = {"strategy": "tensor", "dynamic": True}
    assert str(one(compressed({"strategy": "tensor"}, dynamic))) == "tensor, input tensor"
    pow2 = {"quant_method": "fp8", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"}
    assert str(one(pow2 | {"weight_block_size": [128, 128]})) == "block, pow2 inputs"


def test_targets_by_name_come_before_patterns_and_classes():
    named = ((["Linear"], "tensor"), (["re:.*q_proj", "re:.*gate"], "channel"), (["a.gate"], "tensor"))
    groups = {str(i): {"targets": t, "weights": EIGHT | {"strategy": s}} for i, (t, s) in enumerate(named)}
    specs, unused = read_specs(compressed({}, None, config_groups=groups, ignore=["re:lm.*", "gone"]), NAMES)
    assert [spec and spec.rows for spec in specs.values()] == [1, 0, None]
    assert unused == ["gone"]
    with pytest.raises(SpecError, match="neither config_groups nor ignore has lm_head"):
        read_specs(compressed({}, None, config_groups={"1": groups["1"]}, ignore=[]), NAMES)


ARGUMENTS = [
    (LayerSpec(rows=1, inputs="token"), {"strategy": "token"}),
    (LayerSpec(rows=1, inputs="tensor"), {"strategy": "tensor"}),
    (LayerSpec(rows=1, inputs="token", group=128), {"strategy": "group", "group_size": 128}),
    (
        LayerSpec(1, 32, "token", 32, exponents=True),
        {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8, "zp_dtype": torch.uint8},
    ),
]


@pytest.mark.parametrize(("spec", "arguments"), ARGUMENTS)
def test_inputs_are_rounded_as_compressed_tensors_rounds_them(spec, arguments):
    x = torch.randn(3, 5, 256) * torch.logspace(-3, 3, 5)[:, None]
    x[1, 2] = 0
    args = QuantizationArgs(**EIGHT | arguments | {"dynamic": True})
    scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Module())
    q = theirs_quantize(x, scale, zero, args, dtype=None)
    wide = scale.repeat_interleave(spec.group, -1) if spec.group else scale
    assert torch.equal(round_input(x, spec), q.float() * wide)


def test_static_inputs_saturate():
    x = torch.linspace(-1200, 1200, 4001)[None]
    actual = round_input(x, LayerSpec(inputs="static"), torch.tensor([2.0]))
    expected = np.clip(x.numpy() / 2, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * 2
    assert np.array_equal(actual.numpy(), expected)
    assert float(actual.max()) == 896


def test_powers_of_two_are_rounded_up():
    x = torch.zeros(4, 32)
    x[0, 3], x[1, 3], x[2, 3] = 448, 449, 1e-3
    x[0, 4] = x[1, 4] = 2**-9  # the smallest number at a scale of 1, and 0 at 2
    actual = round_input(x, LayerSpec(1, 32, "token", 32, exponents=True))
    assert actual[0, 3:5].tolist() == [448, 2**-9]
    assert actual[1, 3:5].tolist() == [448, 0]  # 224 * 2
    assert float(actual[2, 3]) == pytest.approx(1e-3, rel=2**-4)
    assert not actual[3].any()


# ---- The reference reads KV caches and the layouts of other writers


@pytest.mark.parametrize("name", with_slow(["llama", "opt"], ("llama",)))
def test_keys_and_values_are_rounded_as_transformers_does(made, tmp_path, name, monkeypatch):
    know_caches(monkeypatch)
    plain = made(name, scheme="channel")
    cached = shutil.copytree(made(name, scheme="channel", kv_cache="fp8"), tmp_path / "cached")
    ends = ("k_scale", "v_scale")
    change_tensors(cached, lambda t: t.update({key: 9 * s for key, s in t.items() if key.endswith(ends)}))
    before, after = (run_verify(folder, made(name)) for folder in (plain, cached))
    assert not after.findings
    assert "keys and values are rounded by the folder's scales, as its cache does" in after.remarks
    transformers, octavo = after.readers[:2]
    assert (transformers.outcome, octavo.outcome) == ("agrees", "agrees")
    assert transformers.distance < 1e-5
    assert before.quality.kl.value < after.quality.kl.value < 2


def test_scales_that_transformers_does_not_use(made, monkeypatch):
    folder = made("llama", scheme="channel", kv_cache="fp8")
    for where in (apply, initialize):  # as compressed-tensors 0.20 answers with transformers 5.24
        monkeypatch.setattr(where, "is_cached_attention_module", lambda module: False)
    report = run_verify(folder, made("llama"))
    assert not report.findings
    assert report.readers[0].outcome == "agrees"
    assert "its KV scales unused" in report.readers[0].note
    assert report.readers[0].distance > 1e-3  # of keys and values that are not rounded


# ---- The quality of the model and of each layer is that of transformers' models, and of NumPy


DOWN = "model.layers.1.mlp.down_proj"
open_float32 = partial(open_theirs, dtype=torch.float32)


def prompts():
    """The windows of 64 bytes that `run_verify` takes, longest first."""
    data = TEXT.encode()
    rows = [torch.tensor(list(data[i : i + 64]))[None] for i in range(0, len(data), 64)]
    return sorted(rows, key=lambda row: -row.shape[1])


def test_quality_is_that_of_transformers(made):
    folder = made("llama", scheme="channel")
    actual = run_verify(folder, made("llama")).quality
    expected = compare(*(partial(outputs, open_float32(path)) for path in (made("llama"), folder)), prompts())
    assert actual.prompts == expected.prompts
    for name in ("kl", "perplexity", "reference_perplexity", "perplexity_ratio", "top1"):
        a, b = getattr(actual, name), getattr(expected, name)
        assert (a.value, a.low, a.high) == pytest.approx((b.value, b.low, b.high), rel=1e-3)


def test_int8_is_the_layers_in_int8(made, tmp_path):
    """The oracle is the BF16 model in transformers, with a hook on each packed layer."""
    pack(made("qwen2"), tmp_path / "out", skip=["*.down_proj"])
    actual = run_verify(tmp_path / "out", made("qwen2")).int8
    plain, int8 = open_float32(made("qwen2")), open_float32(made("qwen2"))

    def hook(module, args, y):
        x, w = args[0].double(), module.weight.double()
        s_x, s_w = (t.abs().amax(-1, keepdim=True) / 127 for t in (x, w))
        y = ((x / s_x).round() * s_x) @ ((w / s_w).round() * s_w).T
        return (y if module.bias is None else y + module.bias.double()).float()

    for name, module in int8.named_modules():
        if name.endswith(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")):
            module.register_forward_hook(hook)
    expected = compare(partial(outputs, plain), partial(outputs, int8), prompts())
    assert actual.kl.value == pytest.approx(expected.kl.value, rel=0.02)  # in float64, ties round to the other side


def test_embeddings_are_those_of_transformers(made):
    folder = made("bert", scheme="channel")
    actual = run_verify(folder, made("bert")).quality
    models = (partial(outputs, open_float32(path)) for path in (made("bert"), folder))
    expected = compare(*models, prompts(), EmbeddingSums)
    assert 1 - actual.cosine.value == pytest.approx(1 - expected.cosine.value, rel=0.01)
    assert 1 - actual.least == pytest.approx(1 - expected.least, rel=0.01)


def inputs_of(model):
    """The inputs [tokens, K] of a layer in the BF16 model."""
    plain, inputs = open_float32(model), []
    site = plain.get_submodule(DOWN)
    site.register_forward_pre_hook(lambda module, args: inputs.append(args[0].detach().flatten(0, -2)))
    for ids in prompts():
        plain(ids)
    return torch.cat(inputs)


def report_of(packed, model):
    report = run_verify(packed, model)
    assert not report.findings
    return next(row for row in report.layers if row.name == DOWN)


def test_the_errors_of_a_layer(made):
    layer = report_of(made("mistral", scheme="channel"), made("mistral"))
    x = inputs_of(made("mistral")).double()
    w = load_file(made("mistral") / "model.safetensors")[f"{DOWN}.weight"].double()
    x_q, w_q = rows_of_e4m3(x), rows_of_e4m3(w)
    assert layer.weight_sqnr == pytest.approx(sqnr(w, w_q), abs=0.01)
    assert layer.output_sqnr == pytest.approx(sqnr(x @ w.T, x_q @ w_q.T), abs=0.05)
    assert (layer.clip_rate, layer.headroom, layer.shape) == (None, None, (128, 256))


def rows_of_e4m3(x):
    """x [M, K], each row rounded to e4m3 by its amax."""
    scale = x.abs().amax(1, keepdim=True).clamp(min=1e-30) / 448
    return torch.from_numpy((x / scale).numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float64)) * scale


def test_clipping_and_headroom(made, tmp_path):
    folder = made("mistral", scheme="static")
    right = report_of(folder, made("mistral"))
    assert right.headroom == pytest.approx(1, abs=0.05)  # calibrated in BF16
    assert right.clip_rate < 1e-3

    shutil.copytree(folder, tmp_path / "clips")
    change_tensors(tmp_path / "clips", lambda t: t.update({f"{DOWN}.input_scale": t[f"{DOWN}.input_scale"] / 8}))
    wrong = report_of(tmp_path / "clips", made("mistral"))
    x = inputs_of(made("mistral")).abs()
    limit = 448 * float(load_file(tmp_path / "clips" / "model.safetensors")[f"{DOWN}.input_scale"])
    assert wrong.headroom == pytest.approx(limit / float(x.max()), rel=1e-4)
    assert wrong.clip_rate == pytest.approx(float((x > limit).double().mean()), rel=1e-3)
    assert wrong.clip_rate > 0.01
    assert wrong.output_sqnr < right.output_sqnr - 5


@pytest.mark.parametrize(
    ("kl", "advice"),
    [((0.01, 0.02), "int8 is nearer to BF16"), ((1e-4, 2e-4), "channel is nearer"), ((1e-3, 2e-3), "do not differ")],
)
def test_the_nearer_scheme_is_named_with_the_speed_of_both(kl, advice):
    report = Report(Path("packed"), Path("model"), layers=[LayerReport("q", "channel", (8, 8))] * 2)
    report.quality, report.int8 = (
        LogitQuality(Estimate(sum(each) / 2, *each), *[Estimate(0.0, 0.0, 0.0)] * 4, 2, 8)
        for each in (kl, (1e-3, 2e-3))
    )
    (quality,) = (section for section in report.tables() if section.title == "Quality")
    assert advice in quality.remark
    speeds = measured_speeds()
    for scheme in ("channel", "int8"):
        assert f"{scheme} {speeds[1][scheme]:.2f}x and {speeds[8192][scheme]:.2f}x" in quality.remark
