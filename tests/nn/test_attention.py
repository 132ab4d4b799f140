"""`nn.MultiheadAttention`, converted: the same function and parameters, with its projections by the recipe."""

import copy

import attention_fp8_oracle as oracle
import pytest
import torch
from generation_examples import model_of
from gpus import poison
from linear_examples import converted_model
from metrics import sqnr
from operation_counts import operations
from torch import Tensor, nn

import octavo
from octavo.models import GPT2Config, LlamaConfig, MixtureConfig, build
from octavo.models.vision import ImageConfig, VisionTransformer
from octavo.nn import use_bf16_attention, use_fp8_attention
from octavo.nn.attention_layers import DECAY, GradientScales, attend_fp8

PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])
SCORES = torch.linspace(-1, 1, 2 * 4 * 5 * 5).view(8, 5, 5)

CALLS = {
    "plain": {},
    "no weights": {"need_weights": False},
    "weights by head": {"average_attn_weights": False},
    "causal": {"attn_mask": torch.ones(5, 5).triu(1).bool(), "is_causal": True, "need_weights": False},
    "padding": {"key_padding_mask": PADDING},
    "padding, no weights": {"key_padding_mask": PADDING, "need_weights": False},
    "scores and padding": {"attn_mask": SCORES, "key_padding_mask": PADDING.float() * -3},
}


def attention(**options) -> nn.MultiheadAttention:
    module = nn.MultiheadAttention(32, 4, **{"batch_first": True} | options)
    for bias in (p for p in module.parameters() if p.ndim == 1):
        nn.init.normal_(bias)  # PyTorch's are zeros
    return module


def gradients(model: nn.Module, output: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output.square().sum(), list(model.parameters())))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("options", [{}, {"batch_first": False}, {"bias": False}], ids=["", "time first", "no bias"])
def test_without_quantization_it_is_the_same_function(options: dict, call: dict) -> None:
    plain = attention(**options)
    converted = converted_model(copy.deepcopy(plain), "bf16")
    x = torch.randn(2, 5, 32)
    x = x if plain.batch_first else x.transpose(0, 1)
    (y, weights), (expected, expected_weights) = converted(x, x, x, **call), plain(x, x, x, **call)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    assert (weights is None) is (expected_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-5)
    for found, known in zip(gradients(converted, y), gradients(plain, expected), strict=True):
        torch.testing.assert_close(found, known, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shared", [True, False], ids=["key is value", "three inputs"])
@pytest.mark.parametrize("options", [{}, {"kdim": 32, "vdim": 16}, {"kdim": 32, "vdim": 32}])
def test_cross_attention_is_the_same_function(options: dict, shared: bool) -> None:
    plain = attention(**options)
    q, k = torch.randn(2, 3, 32), torch.randn(2, 5, 32)
    v = k if shared and plain.vdim == 32 else torch.randn(2, 5, plain.vdim)
    converted = converted_model(copy.deepcopy(plain), "bf16")
    torch.testing.assert_close(converted(q, k, v)[0], plain(q, k, v)[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(converted(q[0], k[0], v[0])[1], plain(q[0], k[0], v[0])[1], rtol=1e-4, atol=1e-5)


def test_its_projections_are_the_bits_of_linear_layers() -> None:
    module = attention()
    inner, outer = nn.Linear(32, 96), nn.Linear(32, 32)
    inner.load_state_dict({"weight": module.in_proj_weight.detach(), "bias": module.in_proj_bias.detach()})
    outer.load_state_dict(module.out_proj.state_dict())
    linears = nn.ModuleList([inner, outer])
    for model in (module, linears):
        octavo.convert(model, "rowwise")
    x = torch.randn(2, 5, 32)
    q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in inner(x).chunk(3, -1))
    expected = outer(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    y, _ = module(x, x, x, need_weights=False)
    assert torch.equal(y, expected)
    for found, known in zip(gradients(module, y), gradients(linears, expected), strict=True):
        assert torch.equal(found, known)


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_other_recipes_run_in_training_and_evaluation(recipe: str) -> None:
    module = attention(dropout=0.5)
    keys = module.state_dict().keys()
    assert octavo.convert(module, recipe).converted == ["out_proj", "in_proj_weight"]
    assert module.state_dict().keys() == keys
    x = torch.randn(2, 5, 32)
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])  # dropout
    with torch.no_grad():
        assert torch.equal(module.eval()(x, x, x)[0], module(x, x, x)[0])


def test_what_is_left_alone_is_named() -> None:
    class Own(nn.MultiheadAttention):
        pass

    parts = {"own": Own(32, 4), "with_keys": attention(add_bias_kv=True), "skipped": attention(), "inner": attention()}
    model = nn.ModuleDict(parts | {"body": nn.Linear(8, 8)})
    report = octavo.convert(model, skip=["skipped", "inner.out_proj"])
    assert report.converted == ["body", "inner.in_proj_weight"]
    x = torch.randn(2, 5, 32)
    assert model["inner"](x, x, x)[0].shape == x.shape
    left = {entry.name for entry in report.coverage.left}
    assert {"own.in_proj_weight", "with_keys.in_proj_weight", "skipped.in_proj_weight"} <= left
    assert report.skipped["skipped.in_proj_weight"] == "skip='skipped'"
    assert "reads its weight directly" in report.skipped["skipped.out_proj"]


def test_a_watch_and_delayed_scales_take_a_model_with_attention() -> None:
    layer = converted_model(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), "delayed")
    x = torch.randn(2, 5, 32)
    watch = octavo.watch(layer, interval=1)
    layer(x).sum().backward()
    watch.step()
    watch.close()
    octavo.scales.update_scales(layer)
    assert octavo.scales.scale_state(layer)["self_attn.histories.x.scale"] > 0
    assert torch.isfinite(layer(x)).all()


# ---- `use_fp8_attention` on models of ours and of transformers: what runs in E4M3, what does not, and its undoing


SIZES = {"vocabulary": 97, "layers": 2, "width": 64, "heads": 4, "context": 32}
LLAMA = SIZES | {"kv_heads": 2, "mlp_width": 96}
IMAGES = ImageConfig(image=8, patch=2, channels=3, classes=5, layers=2, width=64, heads=4)
MODELS = {
    "llama": lambda: build(LlamaConfig(**LLAMA)),
    "mixture": lambda: build(MixtureConfig(**LLAMA, experts=4, top_k=2)),
    "gpt2": lambda: build(GPT2Config(**SIZES)),
    "vision": lambda: VisionTransformer(IMAGES),
    "transformers": lambda: model_of("llama").train(),
    "qwen3": lambda: model_of("qwen3").train(),
}
FORWARD, BACKWARD = "octavo::fp8_attention", "octavo::fp8_attention_backward"
IDS = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(0))


def results(model, **inputs):
    """Logits, and the gradient of the first weight of an attention."""
    model.zero_grad()
    output = model(IDS, **inputs)
    logits = getattr(output, "logits", output).float()
    logits.square().mean().backward()
    weight = next(p for name, p in model.named_parameters() if "q_proj.weight" in name)
    return logits.detach(), weight.grad.clone()


@pytest.mark.parametrize("name", ["llama", "gpt2", "transformers", "qwen3"])
def test_both_passes_run_in_fp8_and_are_near_bf16(name):
    model = MODELS[name]()
    expected, keys = results(model), list(model.state_dict())
    assert len(use_fp8_attention(model, shortest=16)) == 2
    seen = operations(lambda: results(model))
    assert (seen[FORWARD], seen[BACKWARD]) == (2, 2)
    for one, other in zip(expected, results(model), strict=True):
        assert sqnr(one, other) > 9
        assert not torch.equal(one, other)
    assert list(model.state_dict()) == keys
    use_bf16_attention(model)
    assert all(map(torch.equal, expected, results(model)))


@pytest.mark.parametrize("name", ["llama", "transformers"])
def test_convert_turns_it_on_and_restore_off(name):
    model = MODELS[name]()
    getattr(model, "set_attn_implementation", str)("eager")  # of transformers, whose own is another
    expected = results(model)
    report = octavo.convert(model, "bf16", attention="fp8")
    assert list(report.fused.values()) == ["attention in FP8, of 8,192 tokens and more"] * 2
    use_fp8_attention(model, shortest=16)
    assert operations(lambda: results(model))[BACKWARD] == 2
    octavo.restore(model)
    assert all(map(torch.equal, expected, results(model)))
    for changes, words in (({"attention": "int8"}, "'bf16' or 'fp8'"), ({"attention": "fp8"}, "no causal attention")):
        with pytest.raises(ValueError, match=words):
            octavo.convert(nn.Linear(8, 8), **changes)


PADDED = {"attention_mask": torch.ones_like(IDS).index_fill(1, torch.arange(3), 0)}


@pytest.mark.parametrize(
    ("name", "inputs", "options"),
    [("llama", {}, {}), ("transformers", {}, {}), ("transformers", PADDED, {"shortest": 16})],
)
def test_short_and_padded_texts_stay_in_bf16(name, inputs, options):
    model = MODELS[name]()
    expected = results(model, **inputs)
    use_fp8_attention(model, **options)
    assert all(map(torch.equal, expected, results(model, **inputs)))


def test_the_flow_of_dtypes_counts_as_many_flops_in_fp8():
    model = MODELS["llama"]()
    plain = octavo.dtype_flow(model, IDS).flops
    use_fp8_attention(model, shortest=16)
    found = octavo.dtype_flow(model, IDS).flops
    for phase, products in (("forward", 2 * 4), ("backward", 5 * 4)):  # of 4 heads
        assert found[phase]["FP8"] == 2 * products * 2 * (2 * 16 * 16 * 16)  # layers, texts
        assert sum(found[phase].values()) == sum(plain[phase].values())


def test_a_model_on_the_meta_device_gets_scales_of_zeros():
    with torch.device("meta"):
        model = MODELS["llama"]()
    use_fp8_attention(model)
    model.to_empty(device="cpu").bfloat16()
    scales = [m.fp8_gradients.amax for m in model.modules() if hasattr(m, "fp8_gradients")]
    assert [(s.tolist(), s.dtype) for s in scales] == [([0, 0, 0], torch.float32)] * 2


def test_a_gpu_without_it_is_refused(monkeypatch):
    monkeypatch.setattr("octavo.nn.attention_layers.choose_device", torch.device)
    monkeypatch.setattr("octavo.nn.attention_layers.fp8_attention_limit", lambda *_, **_named: "no cuDNN")
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn: no cuDNN\. Leave attention in BF16"):
        use_fp8_attention(MODELS["llama"](), device="cuda")


# ---- Attention in E4M3 with its gradient: against float64, over passes whose gradients grow, and in compiled code


@pytest.mark.parametrize(
    ("factor", "mean", "ratio"), [(1.0, 0, 1), (2.0**-40, 0, 1), (2.0**40, 0, 1), (1.0, 16, 1), (1.0, 0, 256)]
)
def test_the_first_pass(factor, mean, ratio):
    """Also where the mean of keys over the tokens is 16 of their deviations, and where they are far above queries."""
    q, k, v, dy = oracle.given(2, 4, 2, 64, 64)
    x = q / ratio, k * ratio + mean * torch.randn(2, 2, 1, 128).bfloat16(), v, dy * factor
    for one, other in zip(oracle.exact(*x), oracle.gradients(x, GradientScales()), strict=True):
        assert sqnr(one, other) > 16
        assert (other.dtype, other.shape) == (torch.bfloat16, one.shape)


def test_a_sink_saturates_once():
    """Every query attends to the first token, whose gradients are hundreds of times larger than others."""
    q, k, v, dy = oracle.given(1, 4, 1, 200, 200)
    q[..., 0], k[..., 0] = 8, 0
    k[:, :, 0, 0] = 16
    x = q, k, v, dy + dy.abs().amax()
    scales, exact = GradientScales(), oracle.exact(*x)
    first, second = oracle.gradients(x, scales)[3], oracle.gradients(x, scales)[3]
    assert sqnr(exact[3], first) < 10
    assert sqnr(exact[3], second) > 20


def test_the_amax_decays_and_ignores_what_is_not_finite():
    scales = GradientScales()
    scales.observe(torch.tensor([1.0, 2.0, 3.0]))
    scales.observe(torch.tensor([0.5, 4.0, torch.inf]))
    assert torch.allclose(scales.amax, torch.tensor([DECAY, 4.0, 3 * DECAY]))
    assert not scales.state_dict()


@pytest.mark.slow
def test_compiled_with_two_sizes_of_heads():
    """With the second size, a dimension that PyTorch compiles for any size, the backward pass took another scale."""
    scales, other = GradientScales(), GradientScales()
    run = torch.compile(lambda *t: attend_fp8(*t, other) * 1, backend="aot_eager", fullgraph=True)
    for dim in (32, 32, 64, 64):
        x = oracle.given(1, 2, 2, 32, 32, dim)
        expected = oracle.gradients(x, scales)
        assert all(map(torch.equal, expected, oracle.gradients(x, other, attend=lambda *t: run(*t[:3]))))
        assert torch.equal(scales.amax, other.amax)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_gpu_against_float64_and_compiled():
    """Heads of 128 after heads of 64, whose size PyTorch would otherwise compile as one of any value."""
    pytest.importorskip("cudnn")
    eager, compiled = GradientScales("cuda"), GradientScales("cuda")
    run = torch.compile(lambda *t: attend_fp8(*t, compiled) * 1, fullgraph=True)
    for dim in (64, 64, 128, 128):
        x = oracle.given(1, 8, 2, 640, 640, dim, device="cuda")
        poison()
        actual = oracle.gradients(x, eager)
        same = oracle.gradients(x, compiled, attend=lambda *t: run(*t[:3]))
        for exact, one, other in zip(oracle.exact(*x), actual, same, strict=True):
            assert sqnr(exact, one) > 16
            assert sqnr(one, other) > 40  # cuDNN's backward pass adds in any order
        assert torch.allclose(eager.amax, compiled.amax, rtol=1e-3)


# ---- The layer after attention saves its input itself where PyTorch's attention saves it too


def marked(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if getattr(module, "input_is_saved", False)]


def after_attention(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules() if name.endswith(("o_proj", "out_proj", "attention.proj"))]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "delayed"])
def test_layers_after_attention_are_marked_and_compute_the_same_bits(recipe: str, name: str) -> None:
    model = converted_model(MODELS[name](), recipe)
    assert len(marked(model)) == 2
    assert marked(model) == after_attention(model)
    inputs, found = torch.randn(2, 3, 8, 8) if name == "vision" else IDS, []
    for saved in (True, False):
        for layer in after_attention(model):
            model.get_submodule(layer).input_is_saved = saved
        y = model(inputs)
        found.append(gradients(model, getattr(y, "logits", y)))
    assert all(map(torch.equal, *found))
    octavo.restore(model)
    assert marked(model) == []


@pytest.mark.parametrize("name", ["llama", "transformers"])
@pytest.mark.parametrize("converted_first", [True, False])
def test_attention_in_fp8_saves_other_bytes(converted_first: bool, name: str) -> None:
    model = MODELS[name]()
    steps = [lambda: octavo.convert(model, "rowwise"), lambda: use_fp8_attention(model, shortest=16)]
    for step in steps if converted_first else reversed(steps):
        step()
    assert marked(model) == []
    use_bf16_attention(model)
    assert marked(model) == after_attention(model)


def test_attention_that_is_not_pytorchs_saves_no_output() -> None:
    model = MODELS["transformers"]()
    model.set_attn_implementation("eager")
    octavo.convert(model, "rowwise")
    assert marked(model) == []


# ---- PyTorch's encoder layers call their converted layers in evaluation mode too


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).eval()


@pytest.mark.parametrize("make", [encoder_layer, lambda: nn.TransformerEncoder(encoder_layer(), 2).eval()])
def test_evaluation_without_gradients_runs_in_fp8(make) -> None:
    model, x = make(), torch.randn(2, 6, 32)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    in_high_precision = model(x, src_key_padding_mask=padding).detach()
    octavo.convert(model, "rowwise")
    with_gradients = model(x, src_key_padding_mask=padding).detach()
    with torch.no_grad():
        y = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(y[~padding], with_gradients[~padding], rtol=1e-5, atol=1e-5)
    assert (y - in_high_precision)[~padding].abs().max() > 1e-3


def test_a_layer_whose_linear_layers_are_skipped_keeps_the_fast_path() -> None:
    model = converted_model(nn.ModuleDict({"encoder": encoder_layer(), "body": nn.Linear(8, 8)}), skip=["encoder.*"])
    assert type(model["encoder"]) is nn.TransformerEncoderLayer
