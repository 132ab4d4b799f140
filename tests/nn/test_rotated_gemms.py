"""Recipes that rotate the operands of y, dx and dw along K, N and T."""

import itertools
from dataclasses import replace

import pytest
import scipy.linalg
import torch
from linear_examples import K, N, T, converted, exact_gradients, run
from metrics import sqnr
from operation_counts import saved_tensors
from torch import Tensor

from octavo.numerics.scaling import scattered_signs
from octavo.ops import quantize
from octavo.recipe import GEMMS, Recipe, blockwise, get_recipe, mxfp8, rowwise, tensorwise

SUBSETS = [chosen for count in (1, 2, 3) for chosen in itertools.combinations(GEMMS, count)]


def rotated(recipe: Recipe, *gemms: str) -> Recipe:
    return replace(recipe, name="rotated", rotate=gemms)


def matrix(n: int) -> Tensor:
    """The rotation of n channels, float64, by scipy."""
    size = n & -n
    return torch.from_numpy(scipy.linalg.block_diag(*[scipy.linalg.hadamard(size) / size**0.5] * (n // size)))


@pytest.mark.parametrize("gemms", SUBSETS, ids="-".join)
@pytest.mark.parametrize("name", ["rowwise", "rowwise_dw_bf16", "tensorwise", "blockwise", "mxfp8"])
def test_every_rotation_is_near_the_exact_product(name: str, gemms: tuple[str, ...]) -> None:
    recipe = get_recipe(name)
    if "dw" in gemms and recipe.dw is None:
        pytest.skip("dw cannot be rotated without casts")
    linear = converted(rotated(recipe, *gemms), bias=True)
    x, dy = torch.randn(T, K), torch.randn(T, N) * 1e-3
    y, dx, dw = exact_gradients(x, linear.weight.detach(), dy)
    limits = (27, 23, 23) if recipe.dy.format == "e5m2" else (27, 27, 27)
    for exact, actual, limit in zip((y + linear.bias.double(), dx, dw), run(linear, x, dy), limits, strict=True):
        assert sqnr(exact, actual) > limit


@pytest.mark.parametrize("recipe", [rowwise(), tensorwise(), blockwise(), mxfp8()], ids=str)
@pytest.mark.parametrize("gemm", GEMMS)
def test_a_rotation_is_for_its_gemm_alone(gemm: str, recipe: Recipe) -> None:
    """It is the product, in float64, of its two operands rotated and quantized; the others have the bits of before.

    A row scale of x and of w is folded into the one dy of dx and dw, so these two change together.
    """
    linear, plain = converted(rotated(recipe, gemm)), converted(recipe)
    plain.weight = linear.weight
    w = linear.weight.detach()
    x, dy = torch.randn(T, K), torch.randn(T, N) * torch.randn(T, 1).exp()
    signs = scattered_signs(T, x.device)[:, None]
    operands = {"y": (x, w), "dx": (dy, w.t()), "dw": ((signs * dy).t(), (signs * x).t())}[gemm]
    casts = getattr(recipe, gemm)
    turned = ((t.double() @ matrix(t.shape[1])).float() for t in operands)
    a, b = (quantize(t, cast).dequantize(torch.float64) for t, cast in zip(turned, (casts.a, casts.b), strict=True))
    found, others = (dict(zip(GEMMS, run(layer, x, dy), strict=True)) for layer in (linear, plain))
    assert sqnr(a @ b.t(), found[gemm]) > 50  # a tie may round the other way
    folded = recipe.dx.b.by_row and gemm != "y"
    unchanged = {"y"} if folded else set(GEMMS) - {gemm}
    assert {name for name in GEMMS if torch.equal(found[name], others[name])} == unchanged


def test_the_preset_has_the_memory_of_tensorwise() -> None:
    def saved_bytes(name: str) -> int:
        return sum(t.nbytes for t in saved_tensors(lambda: converted(name)(torch.randn(T, K, requires_grad=True))))

    assert saved_bytes("tensorwise") == saved_bytes("tensorwise_rotated")


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


@pytest.mark.parametrize("gemms", SUBSETS, ids="-".join)
def test_a_weight_that_y_reads_without_a_rotation_is_cached(gemms: tuple[str, ...]) -> None:
    linear = converted(rotated(rowwise(), *gemms))
    assert (linear.cached_weights() is not None) == ("y" not in gemms)
