"""The experts of a mixture against a loop over tokens in float64, plain and by a recipe, with all gradients."""

import pytest
import torch
import torch.nn.functional as F
from metrics import sqnr
from torch import Tensor

from octavo.nn import Experts
from octavo.recipe import Recipe, rowwise

E, K, HIDDEN, TOKENS, TOP_K = 5, 64, 48, 40, 2


def experts(recipe: Recipe | None = None, dtype: torch.dtype = torch.bfloat16) -> Experts:
    torch.manual_seed(0)
    made = Experts(E, K, HIDDEN).to(dtype)
    made.recipe = recipe
    return made


def given(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, the experts of each token (nobody chose expert 3), their weights, and the gradient of the output."""
    torch.manual_seed(1)
    score = torch.rand(TOKENS, E)
    score[:, 3] = -1
    x, dy = (torch.randn(TOKENS, K).to(dtype) for _ in range(2))
    return x.requires_grad_(), score.topk(TOP_K).indices, torch.rand(TOKENS, TOP_K, requires_grad=True), dy


def results(module: Experts, x: Tensor, index: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    """The output, and the gradients of x, the weights and both matrices."""
    leaves = (x, weight, module.gate_up_proj, module.down_proj)
    for leaf in leaves:
        leaf.grad = None
    y = module(x, index, weight)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def oracle(module: Experts, x: Tensor, index: Tensor, weight: Tensor, dy: Tensor) -> list[Tensor]:
    """The same in float64, token by token."""
    leaves = [t.detach().double().requires_grad_() for t in (x, weight, module.gate_up_proj, module.down_proj)]
    wide, factors, w_in, w_out = leaves
    tokens = []
    for t in range(TOKENS):
        parts = []
        for s, e in enumerate(index[t].tolist()):
            if e < E:
                gate, up = (w_in[e] @ wide[t]).chunk(2)
                parts.append(factors[t, s] * (w_out[e] @ (F.silu(gate) * up)))
        tokens.append(sum(parts, torch.zeros(K, dtype=torch.float64)))
    y = torch.stack(tokens)
    y.backward(dy.double())
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(("recipe", "least"), [(None, 40), (rowwise(), 22)], ids=["bf16", "rowwise"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["", "some elsewhere"])
def test_output_and_gradients(recipe, least, elsewhere):
    module, (x, index, weight, dy) = experts(recipe), given()
    if elsewhere:  # as with expert parallelism: the number E is no expert here
        index[::3, 1] = E
    expected = oracle(module, x, index, weight, dy)
    for one, exact in zip(results(module, x, index, weight, dy), expected, strict=True):
        assert sqnr(exact, one) > least
    assert not module.gate_up_proj.grad[3].any()
    assert not module.down_proj.grad[3].any()


def test_plain_experts_are_exact_in_float32():
    module, values = experts(dtype=torch.float32), given(torch.float32)
    for one, exact in zip(results(module, *values), oracle(module, *values), strict=True):
        assert sqnr(exact, one) > 100


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [None, rowwise()], ids=["bf16", "rowwise"])
def test_compiled_code_has_the_same_bits(recipe):
    module, values = experts(recipe), given()
    expected = results(module, *values)
    module.compile(fullgraph=True)
    for one, other in zip(results(module, *values), expected, strict=True):
        if recipe is None:
            assert sqnr(other, one) > 40  # Inductor rounds the products of the activation less often
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", [None, rowwise()], ids=["bf16", "rowwise"])
def test_no_tokens(recipe):
    module, x = experts(recipe), torch.zeros(0, K, dtype=torch.bfloat16, requires_grad=True)
    y = module(x, torch.zeros(0, TOP_K, dtype=torch.int64), torch.zeros(0, TOP_K))
    y.sum().backward()
    assert y.shape == (0, K)
    assert not module.gate_up_proj.grad.any()
    assert not module.down_proj.grad.any()


@pytest.mark.parametrize("recipe", [None, rowwise()], ids=["bf16", "rowwise"])
@pytest.mark.parametrize("nowhere", [False, True], ids=["rows of zeros", "no rows"])
def test_groups_of_zeros_everywhere_give_zeros(recipe, nowhere):
    module, (x, index, weight, dy) = experts(recipe), given()
    x = torch.zeros_like(x).requires_grad_() if not nowhere else x
    found = results(module, x, torch.full_like(index, E) if nowhere else index, weight, dy)
    assert all(t.isfinite().all() for t in found)
    y, dx, dweight, *dw = found
    assert not any(t.any() for t in (y, dweight, *dw))
    assert not (nowhere and dx.any())


def test_index_and_weights_must_match():
    module, (x, index, weight, _) = experts(), given()
    with pytest.raises(ValueError, match=r"got \[40, 2\] and \[40, 1\]"):
        module(x, index, weight[:, :1])
    with pytest.raises(ValueError, match=r"got \[39, 2\] and \[39, 2\]"):
        module(x, index[1:], weight[1:])


def test_they_are_shown_with_their_recipe():
    assert repr(experts(rowwise())) == f"Experts(experts={E}, width={K}, mlp_width={HIDDEN}, recipe=rowwise)"
