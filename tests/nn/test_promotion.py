"""A layer that is promoted computes as one that was converted to the new recipe, and its fused module as its parts."""

from inspect import signature
from typing import Any

import pytest
import torch
from linear_examples import QUANTIZED, K, N, T, converted, converted_model, run
from torch import nn
from torch._dynamo.testing import CompileCounter

import octavo
from octavo.nn import Experts, SwiGLU
from octavo.nn.selection import e5m2_gradients, promote
from octavo.recipe import PRESETS

WITH_E4M3 = {name: PRESETS[name]("e4m3") for name in QUANTIZED if signature(PRESETS[name]).parameters}


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(T, K), torch.randn(T, N)


def same(a: nn.Module, b: nn.Module) -> bool:
    x, dy = operands()
    return all(torch.equal(ours, theirs) for ours, theirs in zip(run(a, x, dy), run(b, x, dy), strict=True))


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_in_bf16_it_is_the_layer_of_the_recipe_bf16(recipe: str) -> None:
    layer = converted(recipe, bias=True)
    plain = converted("bf16", bias=True)
    plain.load_state_dict(layer.state_dict())
    run(layer, *operands())
    promote(layer, "bf16")
    assert same(layer, plain)
    assert layer.recipe.name == "bf16"


@pytest.mark.parametrize("recipe", WITH_E4M3)
def test_with_gradients_in_e5m2_it_is_the_layer_of_the_recipe_with_these(recipe: str) -> None:
    layer, wide = converted(WITH_E4M3[recipe]), converted(PRESETS[recipe]("e5m2"))
    wide.load_state_dict(layer.state_dict())
    promote(layer, "e5m2")
    assert same(layer, wide)
    assert layer.recipe.name == f"{recipe}_e5m2"
    assert e5m2_gradients(layer) is None
    with pytest.raises(ValueError, match=r"cannot move to e5m2: .*_e5m2 has no dy in e4m3.*bf16"):
        promote(layer, "e5m2")


def test_histories_stay_and_that_of_dy_keeps_its_amax() -> None:
    layer = converted(WITH_E4M3["delayed"])
    for _ in range(2):
        run(layer, *operands())
        octavo.scales.update_scales(layer)
    before: Any = layer.histories
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
    handle = parts.up_proj.register_forward_hook(lambda *_: None)  # so that the layers run one by one
    x = torch.randn(T, K)
    mlp(x)
    for module in (mlp, parts):
        promote(module.get_submodule("up_proj"), to)
    with octavo.scales.cast_once(mlp):
        assert torch.equal(mlp(x), parts(x))
        mlp(x).square().sum().backward()
    parts(x).square().sum().backward()
    handle.remove()
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
