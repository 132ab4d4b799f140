"""Inside a block of `high_precision` a model has the bits of one converted to "bf16", and after it its own."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from linear_examples import K, N, SelfAttention, T, converted, converted_model, run
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import octavo
from octavo.checkpoint.scheme import CHANNEL
from octavo.inference.packed_linear import PackedLinear
from octavo.models import GPT2Config, LlamaConfig, MixtureConfig, build
from octavo.nn import SwiGLU, high_precision, use_bf16_attention, use_fp8_attention

SIZES: dict[str, Any] = {"vocabulary": 64, "layers": 1, "width": 64, "heads": 4, "context": 32}


def tokens() -> Tensor:
    return torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1))


def image() -> Tensor:
    return torch.randn(2, 24, 8, 8, generator=torch.Generator().manual_seed(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
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
def test_every_kind_of_layer_computes_in_high_precision_inside(make: Any, inputs: Any) -> None:
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
