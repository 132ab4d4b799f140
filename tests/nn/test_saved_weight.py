"""From the forward to the backward pass a layer saves no bytes of its weight that can be computed again."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.nn import linear_function
from octavo.recipe import Recipe, mxfp8, rowwise, tensorwise

T, K, N = 24, 160, 288
QUANTIZED = [name for name in octavo.PRESETS if name != "bf16"]


def make(recipe: str | Recipe) -> octavo.Linear:
    linear = nn.Linear(K, N, bias=False)
    octavo.convert(linear, recipe)
    return linear


def step(linear: octavo.Linear) -> tuple[Tensor, Tensor]:
    """dx and dw of one step whose input is always the same."""
    torch.manual_seed(1)
    x, dy = torch.randn(T, K, requires_grad=True), torch.randn(T, N)
    return torch.autograd.grad(linear(x), [x, linear.weight], dy)


def saved_of_weight(linear: octavo.Linear, x: Tensor) -> int:
    """Bytes of the saved tensors that are as large as the weight, without the weight itself."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(x)
    return sum(t.nbytes for t in saved if t.numel() == N * K and t.data_ptr() != linear.weight.data_ptr())


def save_everything(w_q, cached, recipe, *, needs_x):
    return (None, None) if w_q is None else (w_q.data, w_q.scale)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_no_bytes_of_the_weight_are_saved(recipe: str) -> None:
    linear = make(recipe)
    for _ in range(2):  # the second pass of `delayed` scales by its history
        assert saved_of_weight(linear, torch.randn(T, K, requires_grad=True)) == 0
        octavo.update_scales(linear)


@pytest.mark.slow
@pytest.mark.parametrize("gemms", [("y",), ("dx",), ("dw",)], ids="-".join)
def test_compiled_code_saves_no_rotated_weight(gemms: tuple[str, ...]) -> None:
    """A rotation of the backward pass that did not wait for dy would be moved to the forward pass, and saved."""
    torch._dynamo.reset()
    linear = make(replace(rowwise(), name="rotated", rotate=gemms))
    linear.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    assert saved_of_weight(linear, torch.randn(T, K, requires_grad=True)) == 0


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_gradients_are_those_of_saved_bytes(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = make(recipe)
    for grown in (1.0, 3.0):  # beyond its history the weight of `delayed` saturates
        linear.weight.data *= grown
        cast_again = step(linear)
        with monkeypatch.context() as patch:
            patch.setattr(linear_function, "_saved_w", save_everything)
            from_saved = step(linear)
        assert all(torch.equal(a, b) for a, b in zip(cast_again, from_saved, strict=True))
        octavo.update_scales(linear)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "blockwise"])
def test_a_weight_that_is_not_finite_gives_no_number(recipe: str) -> None:
    linear = make(recipe)
    step(linear)
    octavo.update_scales(linear)
    linear.weight.data[3, 5] = torch.inf
    assert not step(linear)[0][:, 5].isfinite().any()


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_bytes_cached_by_cast_once_are_used(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    linear = make(recipe)
    with octavo.cast_once(linear):
        inside = step(linear)
        assert saved_of_weight(linear, torch.randn(T, K, requires_grad=True)) in (0, N * K)
    assert all(torch.equal(a, b) for a, b in zip(inside, step(linear), strict=True))


@pytest.mark.parametrize("preset", [tensorwise, rowwise])
def test_bytes_that_were_drawn_stay_those_of_the_forward_pass(preset) -> None:
    plain = preset()
    w = replace(plain.w, rounding="stochastic")
    recipe = replace(plain, name="drawn", y=replace(plain.y, b=w), dx=replace(plain.dx, b=w))
    linear = make(recipe)
    assert saved_of_weight(linear, torch.randn(T, K, requires_grad=True)) == N * K
    x = torch.eye(K, requires_grad=True)
    dy = torch.eye(N)[:K]
    torch.manual_seed(5)
    y = linear(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(dx.t()[:, :K], y.detach()[:, :K], rtol=0.02, atol=1e-6)


def test_a_frozen_input_keeps_the_scale_alone() -> None:
    recipe = replace(tensorwise(), name="drawn", dw=mxfp8().dw)
    assert saved_of_weight(make(recipe), torch.randn(T, K)) == 0


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "delayed"])
def test_saving_the_input_gives_the_bits_of_saving_its_bytes(recipe: str) -> None:
    layers = [nn.Linear(32, 32), nn.Linear(32, 32)]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(2, 5, 32)
    for layer in layers:
        octavo.convert(layer, recipe)
    layers[1].input_is_saved = True
    gradients = []
    for layer in layers:
        leaf = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(layer(leaf).square().sum(), [leaf, layer.weight, layer.bias]))
    assert all(map(torch.equal, *gradients))
