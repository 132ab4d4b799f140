"""When a norm and its layers, or an MLP, run as one function, and when layer by layer."""

import copy
from dataclasses import replace

import pytest
import torch
from fused_oracle import (
    BUILDERS,
    Block,
    NormThenLinears,
    NormThenMLP,
    check,
    check_equal,
    geglu,
    gelu,
    is_fused,
    linears,
    run,
    swiglu,
    tokens,
)
from operation_counts import operations
from torch import Tensor, nn

import octavo
from octavo.nn import SwiGLU
from octavo.nn.norm_linear import read_norm
from octavo.recipe import rowwise

UNFUSABLE = [name for name in octavo.PRESETS if name != "rowwise"]
GRADIENTS_E5M2_DB = 40  # of two ways through the same bytes


@BUILDERS
def test_unconverted_it_is_plain_pytorch(build) -> None:
    block, x, residual = build(), tokens(7), tokens(7)
    assert not any(name.startswith("octavo::") for name in operations(lambda: block(x, residual)))
    check_equal(run(block, block.separate, x, residual), run(block, block, x, residual))
    check_equal(run(block, block.separate, x), run(block, block, x))


def test_a_residual_needs_a_norm() -> None:
    for block in (swiglu("none"), gelu("none")):
        for _ in range(2):
            with pytest.raises(ValueError, match="a residual needs a norm: pass both, or add it to x"):
                block.mlp(tokens(3), residual=tokens(3))
            octavo.convert(block)


def test_tensor_parallelism_refuses_a_geglu() -> None:
    block = geglu()
    block.mlp.fc1.parallel = "a way"
    with pytest.raises(ValueError, match="cuts the first layer of a GEGLU between up and gate"):
        block(tokens(3))


@BUILDERS
def test_no_tokens(build) -> None:
    block = build()
    octavo.convert(block)
    x, residual = torch.randn(2, 0, 64, requires_grad=True), torch.randn(2, 0, 64, requires_grad=True)
    *ys, total = block(x, residual)
    assert all(y.shape[:2] == (2, 0) for y in ys)
    assert total.shape == (2, 0, 64)
    sum(y.sum() for y in ys).backward()
    assert x.grad.shape == residual.grad.shape == (2, 0, 64)
    assert not any(p.grad.any() for p in block.parameters())


def check_unfused(block: Block) -> None:
    other, x, residual = copy.deepcopy(block), tokens(33), tokens(33)
    assert not is_fused(copy.deepcopy(block), x)
    for seed in range(2):  # the second pass of `delayed` scales by its history
        torch.manual_seed(seed)
        expected = run(other, other.separate, x, residual)
        torch.manual_seed(seed)
        check_equal(expected, run(block, block, x, residual))
        octavo.update_scales(block)
        octavo.update_scales(other)


@pytest.mark.parametrize("recipe", UNFUSABLE)
@pytest.mark.parametrize("build", [linears, swiglu])
def test_a_recipe_that_is_not_fusable_runs_layer_by_layer(build, recipe: str) -> None:
    block = build()
    octavo.convert(block, recipe)
    check_unfused(block)


def test_a_rotation_and_stochastic_rounding_run_layer_by_layer() -> None:
    plain = rowwise()
    c = replace(plain.dy, rounding="stochastic")
    stochastic = replace(plain, dx=replace(plain.dx, a=c), dw=replace(plain.dw, a=c))
    for recipe in (replace(plain, rotate=("y",)), stochastic):
        block = swiglu()
        octavo.convert(block, recipe)
        check_unfused(block)


@pytest.mark.parametrize(
    ("odd", "other"),
    [
        ("layers.1", "skipped"),
        ("mlp.gate_proj", "skipped"),
        ("mlp.down_proj", "skipped"),
        ("mlp.fc2", "skipped"),
        ("mlp.down_proj", "tensorwise"),
        ("layers.0", "rowwise e5m2"),
    ],
)
def test_layers_that_are_not_all_alike_run_one_by_one(odd: str, other: str) -> None:
    block = {"layers": linears, "mlp.fc": gelu}.get(odd[:6], swiglu)()
    octavo.convert(block, skip=(odd,))
    if other != "skipped":
        holder, _, name = odd.rpartition(".")
        parent = nn.ModuleDict({name: block.get_submodule(odd)})
        octavo.convert(parent, rowwise("e5m2") if "e5m2" in other else other)
    check_unfused(block)


def test_gradients_in_e5m2_are_fused_too() -> None:
    block, x, residual = swiglu(), tokens(130), tokens(130)
    octavo.convert(block, rowwise("e5m2"))
    assert is_fused(block, x)
    check(run(block, block.separate, x, residual), run(block, block, x, residual), GRADIENTS_E5M2_DB)


class OwnNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().mean(-1, keepdim=True)


@pytest.mark.parametrize(
    "norm", [OwnNorm(), nn.LayerNorm(64, elementwise_affine=False), nn.RMSNorm(64, elementwise_affine=False)]
)
def test_a_norm_of_another_kind_runs_by_itself(norm: nn.Module) -> None:
    for block in (NormThenLinears(norm, 64, (40, 17), (True, True)), NormThenMLP(norm, SwiGLU(64, 96))):
        octavo.convert(block)
        check_unfused(block)


@pytest.mark.parametrize(
    ("norm", "trained", "served"),
    [
        (nn.LayerNorm(8192), True, True),
        (nn.LayerNorm(16384), False, True),
        (nn.LayerNorm(16400), False, False),
        (nn.RMSNorm(16384), True, True),
        (nn.RMSNorm(16400), False, False),
    ],
)
def test_long_norms_are_not_fused(norm: nn.Module, trained: bool, served: bool) -> None:
    assert (read_norm(norm) is not None) is trained
    assert (read_norm(norm, backward=False) is not None) is served
