"""Adapters around frozen layers in the fused passes: their numbers, what is kept for backward, and where they go."""

from functools import partial

import pytest
import torch
from adapter_oracle import wrap
from fused_oracle import (
    BFLOAT16_DB,
    FLOAT32_DB,
    check,
    check_equal,
    exact,
    gelu,
    is_fused,
    linears,
    run,
    swiglu,
    tokens,
)
from linear_examples import converted_model
from operation_counts import operations, saved_tensors
from torch import Tensor, nn

BLOCKS = pytest.mark.parametrize(
    ("build", "kind", "without"),
    [(linears, "rms", ""), (linears, "llama", "layers.1"), (swiglu, "rms", ""), (swiglu, "llama", "mlp.down_proj"),
     (swiglu, "rms", "mlp.up_proj"), (swiglu, "none", ""), (gelu, "none", "mlp.fc1")],
)  # fmt: skip


def adapted(build, kind: str, without: str = "", dtype: torch.dtype = torch.float32):
    return wrap(converted_model(build(kind).to(dtype)), without)


def inputs(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor | None]:
    return tokens(33, dtype=dtype), None if kind == "none" else tokens(33, dtype=dtype)


@BLOCKS
def test_outputs_and_gradients_are_the_formulas_of_their_bytes(build, kind: str, without: str) -> None:
    block = adapted(build, kind, without)
    x, residual = inputs(kind)
    assert is_fused(block, x)
    check(exact(block, x, residual, torch.float32), run(block, block, x, residual), FLOAT32_DB)


@pytest.mark.parametrize("build", [linears, swiglu])
def test_adapters_in_float32_around_layers_in_bf16_compute_in_bf16(build) -> None:
    block = adapted(build, "rms", dtype=torch.bfloat16)
    x, residual = inputs("rms", torch.bfloat16)
    actual = run(block, block, x, residual)
    assert {t.dtype for name, t in actual.items() if name.endswith((".a", ".b"))} == {torch.float32}
    check(exact(block, x, residual, torch.bfloat16), actual, BFLOAT16_DB - 10)  # bytes of h fall either way


def test_the_input_of_the_activation_is_computed_again_with_its_adapters() -> None:
    block = adapted(swiglu, "rms")
    x, residual = inputs("rms")
    expected = run(block, block, x, residual)
    block.zero_grad()
    block.mlp.recompute = True
    check_equal(expected, run(block, block, x, residual))


def test_there_is_no_gradient_of_a_weight_and_none_below_the_first_adapter() -> None:
    """Four GEMMs: y and dx of the inner layers and of the outer one; three where x has no gradient."""

    def step(block: nn.Module, x: Tensor) -> None:
        block(x)[0].sum().backward()

    for build, expected in ((swiglu, [4, 4]), (linears, [2, 1])):
        block, x = adapted(build, "rms"), tokens(33)
        steps = [partial(step, block, x.clone().requires_grad_()), partial(step, block, x)]
        assert [operations(call)["octavo::scaled_mm"] for call in steps] == expected


def test_adapters_keep_their_ranks_for_the_backward_pass() -> None:
    """Of an MLP: x + residual, u in BF16, a float32 a token for each norm and scale, and the ranks of two products."""
    block = adapted(swiglu, "rms", dtype=torch.bfloat16)
    known = {p.data_ptr() for p in block.parameters()}
    x, residual = inputs("rms", torch.bfloat16)
    kept = saved_tensors(lambda: block(x.requires_grad_(), residual))
    activations = {t.data_ptr(): t for t in kept if t.shape[:1] == (33,) and t.data_ptr() not in known}
    floats = 4 * (2 + 2)  # mean, rstd, and the scales of n and h
    ranks = 2 * (2 * 4 + 4)
    assert sum(t.nbytes for t in activations.values()) == 33 * (2 * 64 + 2 * 2 * 96 + floats + ranks)


def test_what_only_the_library_computes_runs_one_by_one() -> None:
    for change in (
        lambda block: setattr(block.layers[0], "parts", lambda: None),
        lambda block: block.layers[0].register_forward_hook(lambda *args: None),
        lambda block: block.layers[0].base_layer.weight.requires_grad_(),
        lambda block: block.half(),
        lambda block: setattr(block, "norm", nn.LayerNorm(64)),
    ):
        block = adapted(linears, "rms")
        change(block)
        assert not is_fused(block, tokens(33, dtype=next(block.parameters()).dtype))
