"""A grouped linear layer: the bits of a dense layer for each group, in forward and backward."""

import pytest
import torch
from grouped_examples import SIZES, offsets_of, rows_of
from metrics import sqnr
from torch import nn

from octavo.nn import GroupedLinear
from octavo.nn.linear import to_fp8_linear
from octavo.recipe import Recipe, rowwise, rowwise_dw_bf16, tensorwise

K, N = 64, 96


def layer(groups: int, recipe: Recipe | None = None, dtype: torch.dtype = torch.bfloat16) -> GroupedLinear:
    torch.manual_seed(0)
    made = GroupedLinear(groups, K, N).to(dtype)
    made.recipe = recipe
    return made


def given(rows: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    sizes = torch.exp2(torch.randint(-6, 7, (rows, 1)))
    return (torch.randn(rows, K) * sizes).to(dtype).requires_grad_(), (torch.randn(rows, N) / sizes).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_group_has_the_bits_of_a_dense_layer(sizes, dtype):
    experts, (x, dy) = layer(len(sizes), rowwise(), dtype), given(sum(sizes), dtype)
    y = experts(x, offsets_of(sizes))
    y.backward(dy)
    for e, rows in enumerate(rows_of(sizes)):
        if rows.stop == rows.start:
            assert not experts.weight.grad[e].any()
            continue
        dense = nn.Linear(K, N, bias=False, dtype=dtype)
        dense.weight.data = experts.weight.data[e]
        alone = x.detach()[rows].requires_grad_()
        expected = to_fp8_linear(dense, rowwise(), "dense")(alone)
        expected.backward(dy[rows])
        assert torch.equal(y[rows], expected)
        assert torch.equal(x.grad[rows], alone.grad)
        assert torch.equal(experts.weight.grad[e], dense.weight.grad)


def test_rows_behind_the_groups_change_nothing():
    sizes, spare = SIZES["ragged"], 5
    experts, (x, dy) = layer(len(sizes), rowwise()), given(sum(sizes) + spare)
    rows = slice(0, sum(sizes))
    experts(x, offsets_of(sizes)).backward(dy)
    again, alone = layer(len(sizes), rowwise()), x.detach()[rows].requires_grad_()
    again(alone, offsets_of(sizes)).backward(dy[rows])
    assert torch.equal(experts.weight.grad, again.weight.grad)
    assert torch.equal(x.grad[rows], alone.grad)


def test_without_a_recipe_it_is_plain_pytorch():
    sizes = SIZES["ragged"]
    experts, (x, _) = layer(len(sizes)), given(sum(sizes))
    expected = torch.cat([x[rows] @ experts.weight[e].t() for e, rows in enumerate(rows_of(sizes))])
    assert sqnr(expected, experts(x, offsets_of(sizes))) > 45


def test_no_rows_at_all():
    experts, x = layer(3, rowwise()), torch.zeros(0, K, dtype=torch.bfloat16, requires_grad=True)
    y = experts(x, offsets_of([0, 0, 0]))
    y.sum().backward()
    assert y.shape == (0, N)
    assert not experts.weight.grad.any()
    assert x.grad.shape == (0, K)


def test_autocast_decides_the_dtype():
    experts, (x, dy) = layer(2, rowwise(), torch.float32), given(12, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = experts(x, offsets_of([5, 7]))
    y.backward(dy.bfloat16())
    assert (y.dtype, x.grad.dtype, experts.weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)


@pytest.mark.parametrize("recipe", [tensorwise(), rowwise_dw_bf16()], ids=lambda r: r.name)
def test_other_recipes_are_refused(recipe):
    experts, (x, _) = layer(2, recipe), given(12)
    with pytest.raises(ValueError, match=f"grouped layers run recipes with row scales.*got {recipe.name}:"):
        experts(x, offsets_of([5, 7]))


def test_from_linears():
    linears = [nn.Linear(K, N, bias=False) for _ in range(3)]
    experts, (x, _) = GroupedLinear.from_linears(linears), given(12, torch.float32)
    expected = torch.cat([linears[0](x[:5]), linears[2](x[5:])])
    torch.testing.assert_close(experts(x, offsets_of([5, 0, 7])), expected)


@pytest.mark.parametrize(
    ("linears", "message"),
    [
        ([nn.Linear(4, 8, bias=False), nn.Linear(4, 6, bias=False)], r"got \[\[6, 4\], \[8, 4\]\]: leave"),
        ([nn.Linear(4, 8)], r"got \[\[8, 4\]\] with biases: leave"),
        ([], r"got \[\]: leave"),
    ],
    ids=["unequal", "bias", "none"],
)
def test_experts_of_unequal_shapes_are_named(linears, message):
    with pytest.raises(ValueError, match=message):
        GroupedLinear.from_linears(linears)


@pytest.mark.parametrize("recipe", [None, rowwise()], ids=["bf16", "rowwise"])
def test_each_group_needs_an_offset(recipe):
    layer = GroupedLinear(3, 32, 16)
    layer.recipe = recipe
    for offsets in (torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"offsets must be torch.int32 \[3\], got"):
            layer(torch.randn(8, 32), offsets)


def test_it_is_shown_with_its_recipe():
    assert repr(layer(2, rowwise())) == f"GroupedLinear(groups=2, in_features={K}, out_features={N}, recipe=rowwise)"
