"""The cost of folding the scale of w into dy, against quantizing every operand separately by row; docs/decisions.md.

The loss is that of dy's power-of-two scales: the largest gradient of a row, which weighs most where few channels carry
the energy, is rounded, where a float32 scale represents it exactly.
"""

import pytest
import torch
from linear_examples import exact_gradients, separately_by_row
from metrics import sqnr
from torch import Tensor, nn

import octavo

T, K, N, SEEDS = 512, 256, 384, 4

KINDS = ("w rows, sigma 1", "w rows, sigma 2", "dy channels, sigma 1", "dy channels, sigma 2", "student")
# The recipe -> the dB that y, dx and dw may lose on average, for each of KINDS.
MOST = {
    "rowwise": [(0.05, 0.8, 0.1), (0.05, 2.2, 0.1), (0.05, 0.8, 0.2), (0.05, 2.2, 0.4), (0.05, 0.6, 0.6)],
    "rowwise_dw_bf16": [(0.05, 0.2, 0.0), (0.05, 0.4, 0.0), (0.05, 0.2, 0.0), (0.05, 0.4, 0.0), (0.05, 0.2, 0.0)],
}


def make(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    x, w, dy = torch.randn(T, K), torch.randn(N, K) * 0.02, torch.randn(T, N) * 1e-3
    sigma = 2 if "2" in kind else 1
    if kind.startswith("w rows"):
        w *= (sigma * torch.randn(N, 1)).exp()
    elif kind.startswith("dy channels"):
        dy *= (sigma * torch.randn(1, N)).exp()
    else:
        student = torch.distributions.StudentT(3.0)
        x, w, dy = student.sample((T, K)), student.sample((N, K)) * 0.02, student.sample((T, N)) * 1e-3
    return x, w, dy


def octavos(recipe: str, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    linear = nn.Linear(K, N, bias=False)
    linear.weight.data.copy_(w)
    octavo.convert(linear, recipe)
    x = x.clone().requires_grad_()
    y = linear(x)
    return y.detach(), *torch.autograd.grad(y, [x, linear.weight], dy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", list(MOST))
def test_what_folding_costs_is_bounded(recipe: str, kind: str) -> None:
    losses = torch.zeros(SEEDS, 3)
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        x, w, dy = make(kind)
        exact = exact_gradients(x, w, dy)
        pairs = zip(exact, separately_by_row(x, w, dy), octavos(recipe, x, w, dy), strict=True)
        losses[seed] = torch.tensor([sqnr(e, s) - sqnr(e, o) for e, s, o in pairs])
    assert (losses.mean(0) <= torch.tensor(MOST[recipe][KINDS.index(kind)])).all(), losses.mean(0)
