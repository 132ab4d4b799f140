"""Recipes that rotate the operands of y, dx and dw along K, N and T."""

import itertools
from dataclasses import replace
from typing import ClassVar

import pytest
import scipy.linalg
import torch
from gemm_examples import worst_row
from linear_examples import K, N, T, converted, exact_gradients, run
from metrics import sqnr
from torch import Tensor, nn

import octavo
from octavo.numerics import hadamard
from octavo.numerics.rotation import scattered_signs
from octavo.ops import quantize
from octavo.recipe import GEMMS, Recipe, blockwise, delayed, get_recipe, mxfp8, rowwise, tensorwise

SUBSETS = [chosen for count in (1, 2, 3) for chosen in itertools.combinations(GEMMS, count)]


def rotated(recipe: Recipe, *gemms: str) -> Recipe:
    return replace(recipe, name="rotated", rotate=gemms)


def matrix(n: int) -> Tensor:
    """The rotation of n channels, float64, by scipy."""
    size = n & -n
    return torch.from_numpy(scipy.linalg.block_diag(*[scipy.linalg.hadamard(size) / size**0.5] * (n // size)))


@pytest.mark.parametrize("gemms", SUBSETS, ids="-".join)
@pytest.mark.parametrize("name", ["rowwise", "rowwise_dw_bf16", "tensorwise", "delayed", "blockwise", "mxfp8"])
def test_every_rotation_is_near_the_exact_product(name: str, gemms: tuple[str, ...]) -> None:
    recipe = get_recipe(name)
    if "dw" in gemms and (recipe.dw is None or recipe.scales_by_history):
        pytest.skip("dw cannot be rotated without casts, or with a history")
    linear = converted(rotated(recipe, *gemms), bias=True)
    x, dy = torch.randn(T, K), torch.randn(T, N) * 1e-3
    y, dx, dw = exact_gradients(x, linear.weight.detach(), dy)
    limits = (27, 23, 23) if recipe.dy.format == "e5m2" else (27, 27, 27)
    for _ in range(2):  # the second pass of `delayed` scales by its history
        found = run(linear, x, dy)
        for exact, actual, limit in zip((y + linear.bias.double(), dx, dw), found, limits, strict=True):
            assert sqnr(exact, actual) > limit
        octavo.update_scales(nn.Sequential(linear))


@pytest.mark.parametrize("recipe", [rowwise(), tensorwise(), blockwise()], ids=str)
def test_a_rotated_dx_is_the_layer_of_the_rotated_w_and_dy(recipe: Recipe) -> None:
    """y and dw of the rotated layer are rotated back, in float64; its bytes are those of one quantization."""
    linear, plain = converted(rotated(recipe, "dx")), converted(recipe)
    plain.weight.data.copy_(hadamard(linear.weight.detach().t()).t())
    x, dy = torch.randn(T, K), torch.randn(T, N)
    y, dx, dw = run(linear, x, dy)
    plain_y, plain_dx, plain_dw = run(plain, x, hadamard(dy))
    assert worst_row(y, (plain_y.double() @ matrix(N)).numpy()) < 1e-6
    assert torch.equal(dx, plain_dx)
    assert worst_row(dw, (matrix(N) @ plain_dw.double()).numpy()) < 1e-6


@pytest.mark.parametrize("recipe", [rowwise(), tensorwise(), blockwise()], ids=str)
def test_a_rotated_dw_is_the_product_of_operands_rotated_along_the_tokens(recipe: Recipe) -> None:
    linear = converted(rotated(recipe, "dw"))
    x, dy = torch.randn(T, K), torch.randn(T, N) * torch.randn(T, 1).exp()
    dw = run(linear, x, dy)[2]
    signs = scattered_signs(T, x.device).double()[:, None]
    x_t, dy_t = ((matrix(T) @ (signs * t.double())).float().t().contiguous() for t in (x, dy))
    dy_q, x_q = (quantize(t, cast).dequantize(torch.float64) for t, cast in ((dy_t, recipe.dw.a), (x_t, recipe.dw.b)))
    exact = dy_q @ x_q.t()
    assert sqnr(exact, dw) > 50  # a tie may round the other way


@pytest.mark.parametrize("recipe", [tensorwise(), blockwise()], ids=str)
def test_a_rotated_dw_leaves_y_and_dx_as_they_are(recipe: Recipe) -> None:
    linear, plain = converted(rotated(recipe, "dw")), converted(recipe)
    plain.weight = linear.weight
    x, dy = torch.randn(T, K), torch.randn(T, N)
    (y, dx, dw), (plain_y, plain_dx, plain_dw) = run(linear, x, dy), run(plain, x, dy)
    assert torch.equal(y, plain_y)
    assert torch.equal(dx, plain_dx)
    assert not torch.equal(dw, plain_dw)


def test_a_rotated_dw_averages_the_errors_of_sums_of_one_sign() -> None:
    """Without signs the rotation puts such a sum into one number, and dw has the error of one pair: 42 dB, not 53."""
    x, dy = 1 + torch.rand(1024, K), 1 + torch.rand(1024, N)
    linear = converted(rotated(mxfp8(), "dw"))
    assert sqnr(exact_gradients(x, linear.weight.detach(), dy)[2], run(linear, x, dy)[2]) > 45


def test_no_rotation_lets_a_token_see_later_ones() -> None:
    linear = converted(rotated(rowwise(), *GEMMS))
    x = torch.randn(T, K)
    changed = torch.cat([x[: T // 2], 100 * torch.randn(T // 2, K)])
    assert torch.equal(linear(x)[: T // 2], linear(changed)[: T // 2])


def test_an_outlier_in_a_gradient_spares_the_other_tokens_and_outputs() -> None:
    """One element of 2^20 takes the range of a tensor-wide scale; rotated along N or T it does not."""
    n = t = 128
    plain = converted(tensorwise("e4m3"), n=n)
    x, dy = torch.randn(t, K), torch.randn(t, n)
    dy[0, 5] = 2.0**20
    _, exact_dx, exact_dw = exact_gradients(x, plain.weight.detach(), dy)
    _, plain_dx, plain_dw = run(plain, x, dy)
    others = torch.arange(n) != 5
    assert sqnr(exact_dx[1:], plain_dx[1:]) < 1
    assert sqnr(exact_dw[others], plain_dw[others]) < 1
    linear = converted(rotated(tensorwise("e4m3"), "dx"), n=n)
    linear.weight = plain.weight
    assert sqnr(exact_dx[1:], run(linear, x, dy)[1][1:]) > 15
    linear = converted(rotated(tensorwise("e4m3"), "dw"), n=n)
    linear.weight = plain.weight
    assert sqnr(exact_dw[others], run(linear, x, dy)[2][others]) > 15


@pytest.mark.slow
@pytest.mark.parametrize("gemms", [("dx",), ("dw",), GEMMS], ids="-".join)
def test_compiled_code_computes_the_same(gemms: tuple[str, ...]) -> None:
    linear = converted(rotated(rowwise(), *gemms), bias=True)
    x, dy = torch.randn(T, K), torch.randn(T, N)
    expected = run(linear, x, dy)
    torch._dynamo.reset()
    linear.compile(backend="aot_eager", fullgraph=True)
    for actual, eager in zip(run(linear, x, dy), expected, strict=True):
        assert torch.equal(actual, eager)


def test_bf16_is_rotated_back_in_float32() -> None:
    """The stages of a rotation in BF16 would cost the output about 10 dB more."""
    linear = converted(replace(rotated(rowwise(), "dx"), y=None))
    x = torch.randn(T, K)
    exact = exact_gradients(x, linear.weight.detach(), torch.zeros(T, N))[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert sqnr(exact, linear(x).detach()) > 46


@pytest.mark.parametrize("gemms", SUBSETS, ids="-".join)
def test_a_weight_that_is_not_rotated_is_cached(gemms: tuple[str, ...]) -> None:
    linear = converted(rotated(rowwise(), *gemms))
    assert (linear.cached_weights() is not None) == (gemms == ("dw",))


def test_amax_values_of_unrotated_tensors_give_no_scales() -> None:
    class Calibration:
        input_histories: ClassVar = {"0": [1.0]}

    model = nn.Sequential(converted(rotated(delayed(), "y")))
    with pytest.raises(ValueError, match="no layer whose scales can be frozen"):
        octavo.freeze_scales(model, [torch.randn(T, K)])
    with pytest.raises(ValueError, match=r"the recipe of 0 .* rotates its tensors, .* leave y and dx out of rotate"):
        octavo.seed_scales(model, Calibration())
    assert not model[0].recipe.scales_by_history


@pytest.mark.slow
def test_two_rotated_layers_compile_in_seconds() -> None:
    """With views between the stages of a rotation, Inductor simplified nested indices for more than ten minutes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    octavo.convert(model, rotated(rowwise(), "y"))
    x, found = torch.randn(48, 64), []
    for forward in (model, torch.compile(model, fullgraph=True)):
        y = forward(x)
        found.append((y.detach(), *torch.autograd.grad(y.square().sum(), list(model.parameters()))))
    for eager, compiled in zip(*found, strict=True):
        assert sqnr(eager, compiled) > 30
