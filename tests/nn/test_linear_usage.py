"""The linear layer as a program uses it: under autocast, frozen, and built by a call."""

import pytest
import torch
from linear_examples import QUANTIZED, K, N, T, converted, exact_gradients
from metrics import sqnr
from operation_counts import saved_tensors
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode

import octavo
from octavo.nn.linear_function import scale_folded

E4M3_DB = 27  # the least sqnr of a product of two operands in e4m3


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_autocast_sets_the_output_dtype_and_nothing_else(recipe: str) -> None:
    """Inside autocast the float32 arithmetic of the operations must stay float32."""
    linear = converted(recipe, bias=True)
    x = torch.randn(T, K, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, linear(x).bfloat16())
    y.float().sum().backward()
    assert x.grad.dtype == linear.weight.grad.dtype == linear.bias.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("recipe", "changed"), [*((name, "weight") for name in octavo.recipe.PRESETS), ("rowwise_dw_bf16", "x")]
)
def test_what_changes_before_the_backward_pass_is_refused(recipe: str, changed: str) -> None:
    """As by `nn.Linear`: the gradients would be those of other numbers."""
    linear, x = converted(recipe), torch.randn(T, K)
    loss = linear(x.requires_grad_()).sum()
    with torch.no_grad():
        {"weight": linear.weight, "x": x}[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_frozen_parts_are_not_computed_or_saved() -> None:
    """LoRA-like: a frozen weight gets no gradient, and the layer then keeps neither x nor its bytes."""
    linear = converted("rowwise")
    linear.weight.requires_grad_(False)
    x = torch.randn(T, K, requires_grad=True)
    assert (T, K) not in [t.shape for t in saved_tensors(lambda: linear(x))]
    linear(x).sum().backward()
    assert linear.weight.grad is None
    trained = converted("rowwise")
    dy = torch.randn(T, N)
    (dx,) = torch.autograd.grad(linear(x), x, dy)
    assert sqnr(exact_gradients(x.detach(), linear.weight, dy)[1], dx) > E4M3_DB
    trained(x.detach()).sum().backward()  # no dx needed
    assert trained.weight.grad is not None


@pytest.mark.parametrize("recipe", ["rowwise", "delayed", octavo.recipe.rowwise()])
def test_a_layer_that_is_built_is_a_layer_that_is_converted(recipe):
    built = octavo.Linear(64, 48, recipe=recipe)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48))
    octavo.convert(model, recipe)
    x = torch.randn(32, 64)
    y = built(x)
    assert torch.equal(y, model(x))
    assert not torch.equal(y, nn.functional.linear(x, built.weight, built.bias))
    y.sum().backward()
    assert built.weight.grad is not None
    assert octavo.restore(built) == [""]
    assert type(built) is nn.Linear


def test_scales_of_one_are_made_once_but_for_a_call_that_is_traced() -> None:
    """Those made in inference mode serve a backward pass, and a fake tensor serves no other call."""
    data = torch.zeros(48, 16, dtype=torch.float8_e4m3fn)
    with FakeTensorMode() as mode:
        assert isinstance(scale_folded(mode.from_tensor(data)).scale, FakeTensor)
    with torch.inference_mode():
        scale = scale_folded(data).scale
    assert torch.equal(scale, torch.ones(48, 1))
    assert not scale.is_inference()
    assert scale_folded(data.clone()).scale is scale
    assert scale_folded(data[:16]).scale.shape == (16, 1)
