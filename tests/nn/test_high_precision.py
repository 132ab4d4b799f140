"""Layers whose precision changes: for a block of `high_precision`, which has the bits of "bf16", or by promotion."""

import copy
from inspect import signature

import pytest
import torch
from linear_examples import QUANTIZED, K, N, SelfAttention, T, converted, converted_model, run
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import octavo
from octavo.checkpoint.scheme import CHANNEL
from octavo.inference.packed_linear import PackedLinear
from octavo.models import GPT2Config, LlamaConfig, MixtureConfig, build
from octavo.nn import Experts, SwiGLU, high_precision, use_bf16_attention, use_fp8_attention
from octavo.nn.selection import e5m2_gradients, promote
from octavo.recipe import PRESETS

SIZES = {"vocabulary": 64, "layers": 1, "width": 64, "heads": 4, "context": 32}


def tokens() -> Tensor:
    return torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1))


def image() -> Tensor:
    return torch.randn(2, 24, 8, 8, generator=torch.Generator().manual_seed(1))


MODELS = {
    "linear layers and fused modules": (lambda: build(LlamaConfig(kv_heads=2, mlp_width=96, **SIZES)), tokens),
    "biases and dropout of 0": (lambda: build(GPT2Config(**SIZES)), tokens),
    "experts": (lambda: build(MixtureConfig(kv_heads=2, mlp_width=96, experts=4, top_k=2, **SIZES)), tokens),
    "attention": (SelfAttention, lambda: image().view(2, 48, 32)),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(24, 16, 4, 4), nn.Conv2d(16, 8, 1)), image),
}


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    y = y[0] if isinstance(y, tuple) else y
    trained = [p for p in model.parameters() if p.requires_grad]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), trained, allow_unused=True)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True) if x is not None)


@pytest.mark.parametrize(("make", "inputs"), MODELS.values(), ids=MODELS)
def test_every_kind_of_layer_computes_in_high_precision_inside(make, inputs) -> None:
    plain, x = make(), inputs()
    model = converted_model(copy.deepcopy(plain), "rowwise")
    octavo.convert(plain, "bf16")
    before, expected = results(model, x), results(plain, x)
    assert not same(before, expected)
    with high_precision(model):
        assert same(results(model, x), expected)
    assert same(results(model, x), before)


def test_blocks_nest_and_end_with_an_exception() -> None:
    layer, x = converted("rowwise"), torch.randn(T, K)
    y = layer(x)
    with high_precision(layer):
        with pytest.raises(KeyError), high_precision(layer):
            raise KeyError
        assert torch.equal(layer(x), x @ layer.weight.t())
    assert torch.equal(layer(x), y)


def test_a_conversion_inside_stays_after_the_block() -> None:
    model = converted_model(nn.Sequential(nn.Linear(K, N), nn.Linear(N, K)))
    with high_precision(model):
        octavo.convert(model, "blockwise", skip=["1"])
    assert (model[0].recipe.name, hasattr(model[1], "recipe")) == ("blockwise", False)


def test_a_backward_pass_computes_as_its_forward_pass_did() -> None:
    layer, x, dy = converted("rowwise"), torch.randn(T, K), torch.randn(T, N)
    (expected,) = torch.autograd.grad(layer(x), [layer.weight], dy)
    y = layer(x)
    with high_precision(layer):
        (inside,) = torch.autograd.grad(y, [layer.weight], dy)
        wide = layer(x)
    assert torch.equal(inside, expected)
    assert torch.equal(torch.autograd.grad(wide, [layer.weight], dy)[0], dy.t() @ x)


def test_the_histories_of_delayed_scaling_see_nothing_inside() -> None:
    layer = converted("delayed")
    run(layer, torch.randn(T, K), torch.randn(T, N))
    before = {name: t.clone() for name, t in octavo.scales.scale_state(layer).items()}
    with high_precision(layer):
        run(layer, torch.randn(T, K) * 100, torch.randn(T, N) * 100)
    assert all(torch.equal(t, before[name]) for name, t in octavo.scales.scale_state(layer).items())


def test_weights_cast_once_are_read_after_the_block_again() -> None:
    layer, x = converted("rowwise"), torch.randn(T, K)
    with octavo.scales.cast_once(layer):
        y = layer(x)
        with high_precision(layer):
            assert torch.equal(layer(x), x @ layer.weight.t())
            with torch.no_grad():
                layer.weight.mul_(2)
        assert torch.equal(layer(x), 2 * y)


def test_attention_in_eight_bits_and_the_fused_loss_follow() -> None:
    model, x = build(LlamaConfig(kv_heads=2, mlp_width=96, **SIZES)), tokens()
    use_fp8_attention(model, shortest=1)
    in_fp8 = results(model, x)[:1]  # the scales of its gradients follow earlier passes
    with high_precision(model):
        inside = results(model, x)
    assert same(results(model, x)[:1], in_fp8)
    use_bf16_attention(model)
    assert same(results(model, x), inside)
    assert not same(inside[:1], in_fp8)


def test_compiled_code_is_compiled_once_for_each_state() -> None:
    torch._dynamo.reset()
    graphs = CompileCounter()
    model, x = converted_model(nn.Sequential(*(SwiGLU(32, 32) for _ in range(2)))), torch.randn(16, 32)
    for mlp in model:
        mlp.compile(backend=graphs, fullgraph=True)
    with torch.no_grad():
        y = model(x)
        with high_precision(model):
            wide, states = model(x), graphs.frame_count
        for _ in range(3):
            assert torch.equal(model(x), y)
            with high_precision(model):
                assert torch.equal(model(x), wide)
        assert graphs.frame_count == states
        octavo.restore(model)
        with torch.compiler.set_stance("force_eager"):
            assert torch.equal(model(x), wide)


def test_layers_without_a_wide_weight_and_other_objects_are_refused() -> None:
    model, x = nn.Sequential(converted("rowwise"), PackedLinear(nn.Linear(N, K), CHANNEL)), torch.randn(T, K)
    y = model[0](x)
    message = r"and 1 \(PackedLinear\) holds it in eight bits alone: octavo unpack"
    with pytest.raises(ValueError, match=message), high_precision(model):
        pass
    assert torch.equal(model[0](x), y)
    with pytest.raises(TypeError, match=r"high_precision takes a torch.nn.Module, got 3"), high_precision(3):
        pass


# ---- A layer that is promoted computes as one that was converted to the new recipe, and its fused module as its parts


WITH_E4M3 = {name: PRESETS[name]("e4m3") for name in QUANTIZED if signature(PRESETS[name]).parameters}


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(T, K), torch.randn(T, N)


def same_layers(a: nn.Module, b: nn.Module) -> bool:
    x, dy = operands()
    return all(torch.equal(ours, theirs) for ours, theirs in zip(run(a, x, dy), run(b, x, dy), strict=True))


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_in_bf16_it_is_the_layer_of_the_recipe_bf16(recipe: str) -> None:
    layer = converted(recipe, bias=True)
    plain = converted("bf16", bias=True)
    plain.load_state_dict(layer.state_dict())
    run(layer, *operands())
    promote(layer, "bf16")
    assert same_layers(layer, plain)
    assert layer.recipe.name == "bf16"


@pytest.mark.parametrize("recipe", WITH_E4M3)
def test_with_gradients_in_e5m2_it_is_the_layer_of_the_recipe_with_these(recipe: str) -> None:
    layer, wide = converted(WITH_E4M3[recipe]), converted(PRESETS[recipe]("e5m2"))
    wide.load_state_dict(layer.state_dict())
    promote(layer, "e5m2")
    assert same_layers(layer, wide)
    assert layer.recipe.name == f"{recipe}_e5m2"
    assert e5m2_gradients(layer) is None
    with pytest.raises(ValueError, match=r"cannot move to e5m2: .*_e5m2 has no dy in e4m3.*bf16"):
        promote(layer, "e5m2")


def test_histories_stay_and_that_of_dy_keeps_its_amax() -> None:
    layer = converted(WITH_E4M3["delayed"])
    for _ in range(2):
        run(layer, *operands())
        octavo.scales.update_scales(layer)
    before = layer.histories
    amax = before["dy"].scale.item() * 448
    promote(layer, "e5m2")
    assert layer.histories is before
    assert before["dy"].scale.item() * 57344 == pytest.approx(amax)
    run(layer, *operands())
    octavo.scales.update_scales(layer)
    dy = before["dy"]
    assert dy.scale.item() * 57344 == pytest.approx(2 * dy.recent.max().item())  # the margin of the preset
    state = octavo.scales.scale_state(layer)
    promote(layer, "bf16")
    assert octavo.scales.scale_state(layer).keys() == state.keys()
    run(layer, *operands())
    octavo.scales.update_scales(layer)
    assert all(torch.equal(octavo.scales.scale_state(layer)[name], state[name]) for name in state)


@pytest.mark.parametrize("to", ["bf16", "e5m2"])
def test_a_fused_module_runs_its_layers_one_by_one(to: str) -> None:
    mlp = converted_model(SwiGLU(K, 64))
    parts = SwiGLU(K, 64)
    parts.load_state_dict(mlp.state_dict())
    octavo.convert(parts)
    parts.up_proj.register_forward_hook(lambda *_: None)  # so that the layers run one by one
    x = torch.randn(T, K)
    mlp(x)
    for module in (mlp, parts):
        promote(module.get_submodule("up_proj"), to)
    with octavo.scales.cast_once(mlp):
        assert torch.equal(mlp(x), parts(x))
        mlp(x).square().sum().backward()
    parts(x).square().sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(mlp.parameters(), parts.parameters(), strict=True))


def test_compiled_code_of_its_block_is_compiled_again() -> None:
    torch._dynamo.reset()
    graphs = CompileCounter()
    model = converted_model(nn.Sequential(*(SwiGLU(32, 32) for _ in range(3))))
    x = torch.randn(16, 32)
    for mlp in model:
        mlp.compile(backend=graphs, fullgraph=True)
    with torch.no_grad():
        model(x)
        first = graphs.frame_count
        promote(model[1].down_proj, "bf16")
        y = model(x)
        assert graphs.frame_count == first + 1
        model(x)
        assert graphs.frame_count == first + 1
        with torch.compiler.set_stance("force_eager"):
            assert torch.equal(y, model(x))


def test_experts_in_bf16_are_those_before_the_conversion() -> None:
    experts, x, weight = Experts(4, 32, 48), torch.randn(20, 32), torch.rand(20, 2)
    index = torch.rand(20, 4).topk(2).indices
    expected = experts(x, index, weight)
    octavo.convert(experts, "rowwise")
    assert not torch.equal(experts(x, index, weight), expected)
    with pytest.raises(ValueError, match="cannot move to e5m2"):
        promote(experts, "e5m2")
    promote(experts, "bf16")
    assert torch.equal(experts(x, index, weight), expected)
    octavo.restore(experts)
    assert experts.recipe is None
