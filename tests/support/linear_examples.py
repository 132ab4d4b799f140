"""Converted models, and a converted linear layer and its three products."""

import torch
from torch import Tensor, nn

import octavo
from octavo.recipe import Recipe

T, K, N = 96, 80, 112
QUANTIZED = [name for name in octavo.recipe.PRESETS if name != "bf16"]
FOUR_BITS = ("mxfp4", "nvfp4")
FOUR_BITS_DB = 12  # at least, with both operands in e2m1


def without_chance(name: str) -> Recipe:
    """The preset of this name, with all operands rounded to nearest."""
    return Recipe.from_json(octavo.recipe.PRESETS[name]().to_json().replace("stochastic", "nearest"))


def converted_model(model, *recipe, **options):
    octavo.convert(model, *recipe, **options)
    return model


def converted(recipe: str | Recipe, bias: bool = False, k: int = K, n: int = N) -> octavo.Linear:
    linear = nn.Linear(k, n, bias=bias)
    octavo.convert(nn.Sequential(linear), recipe)
    return linear


def run(linear: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = linear(x)
    dx, dw = torch.autograd.grad(y, [x, linear.weight], dy)
    return y.detach(), dx, dw


def exact_gradients(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, w, dy = x.double(), w.double(), dy.double()
    return x @ w.t(), dy @ w, dy.t() @ x


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]
