"""Layers with some of their three GEMMs in BF16 (`Recipe.in_bf16`)."""

import pytest
import torch
from linear_examples import QUANTIZED, K, N, T, converted, exact_gradients, run
from metrics import sqnr

import octavo

RECIPES = [name for name in QUANTIZED if name != "rowwise_dw_bf16"]
PRODUCTS = ("y", "dx", "dw")


def products(recipe: octavo.Recipe) -> dict[str, torch.Tensor]:
    """The three products of the same operands: the second step, in which `delayed` has its scales."""
    torch.manual_seed(0)
    linear, x, dy = converted(recipe), torch.randn(T, K), torch.randn(T, N) * torch.randn(T, 1).exp()
    for _ in range(2):
        found = run(linear, x, dy)
        octavo.update_scales(linear)
    return dict(zip(PRODUCTS, found, strict=True)) | {
        "exact": [x @ linear.weight.t(), *exact_gradients(x, linear.weight, dy)[1:]]
    }


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("gemm", PRODUCTS)
def test_one_gemm_in_bf16_is_exact_and_the_others_are_those_of_the_recipe(name, gemm):
    whole, partly = products(octavo.PRESETS[name]()), products(octavo.PRESETS[name]().in_bf16(gemm))
    for product, exact in zip(PRODUCTS, partly["exact"], strict=True):
        if product == gemm:  # in the dtype of the input, float32 here
            assert sqnr(exact, partly[product]) > 100
            assert sqnr(exact, whole[product]) < 40
        elif gemm == "y" or product == "y" or name != "rowwise":
            assert torch.equal(partly[product], whole[product]), product
        else:  # of dx and dw, scales of the one are folded into the dy of the other
            assert sqnr(exact, partly[product]) > sqnr(exact, whole[product]) - 0.5


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("gemm", PRODUCTS)
def test_one_gemm_in_eight_bits(name, gemm):
    others = [product for product in PRODUCTS if product != gemm]
    found = products(octavo.PRESETS[name]().in_bf16(*others))
    for product, exact in zip(PRODUCTS, found["exact"], strict=True):
        assert sqnr(exact, found[product]) > 100 if product in others else 20 < sqnr(exact, found[product]) < 40


@pytest.mark.parametrize("gemm", PRODUCTS)
def test_cached_bytes_give_the_same_products(gemm):
    linear, x, dy = converted(octavo.PRESETS["rowwise"]().in_bf16(gemm)), torch.randn(T, K), torch.randn(T, N)
    alone = run(linear, x, dy)
    with octavo.cast_once(linear):
        cached = run(linear, x, dy)
    assert all(torch.equal(a, b) for a, b in zip(alone, cached, strict=True))
