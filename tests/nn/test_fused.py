"""The numbers of norm+linear and of the MLP as one function each: against float64 on the very bytes that the formulas
name (`fused_oracle`), and against the layers that they replace."""

import copy

import fused_oracle as oracle
import pytest
import torch
from linear_examples import converted_model
from metrics import sqnr
from operation_counts import operations, saved_tensors
from torch import Tensor, nn

import octavo
from octavo.nn import SwiGLU
from octavo.nn.fused import bias_gradient
from octavo.nn.fused_modules import read_norm
from octavo.recipe import rowwise


@pytest.mark.parametrize(
    ("dtype", "autocast", "least"),
    [
        (torch.float32, False, oracle.FLOAT32_DB),
        (torch.bfloat16, False, oracle.BFLOAT16_DB),
        (torch.float32, True, oracle.AUTOCAST_DB),
        (torch.float16, True, oracle.BFLOAT16_DB),
    ],
    ids=["fp32", "bf16", "autocast", "autocast fp16"],
)
@pytest.mark.parametrize(
    ("norm", "size", "bias", "with_residual"),
    [
        ("rms", (1, 40, 24), True, True),
        ("rms without eps", (7, 64, 33), False, True),
        ("llama", (33, 130, 97), True, False),
        ("layer", (130, 64, 112), False, False),
        ("layer without bias", (1, 40, 24), True, True),
    ],
)
@oracle.BUILDERS
def test_outputs_and_gradients_are_the_formulas_of_their_bytes(
    build, norm, size, bias, with_residual, dtype, autocast, least
):
    t, k, f = size
    if autocast:  # so that each norm is tested with and without bias and residual
        bias, with_residual = not bias, not with_residual
    block = converted_model(build(norm, k, f, bias).to(dtype))
    x, residual = oracle.tokens(t, k, dtype), oracle.tokens(t, k, dtype) if with_residual else None
    assert oracle.is_fused(block, x)
    actual = oracle.run(block, block, x, residual, autocast=autocast)
    oracle.check(oracle.exact(block, x, residual, torch.bfloat16 if autocast else dtype), actual, least)
    if with_residual:
        assert torch.equal(actual["d x"], actual["d residual"])


@pytest.mark.parametrize("size", [(1, 40, 24), (7, 64, 33), (33, 130, 97), (130, 64, 112)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("build", [oracle.swiglu, oracle.gelu])
def test_an_mlp_without_a_norm(build, size: tuple[int, int, int], bias: bool) -> None:
    t, k, f = size
    for dtype, least in ((torch.float32, oracle.FLOAT32_DB), (torch.bfloat16, oracle.BFLOAT16_DB)):
        block, x = converted_model(build("none", k, f, bias).to(dtype)), oracle.tokens(t, k, dtype)
        oracle.check(oracle.exact(block, x, None, dtype), oracle.run(block, block, x), least)


@oracle.BUILDERS
def test_near_the_exact_function_and_nearer_to_the_layers_it_replaces(build) -> None:
    """In float32, where nothing is rounded on the way from one operation to the next."""
    block, x, residual = build(), oracle.tokens(130), oracle.tokens(130)
    unquantized = oracle.exact_unquantized(block, x, residual)
    octavo.convert(block)
    actual = oracle.run(block, block, x, residual)
    oracle.check(unquantized, actual, oracle.NEAR_UNQUANTIZED_DB)
    assert sqnr(unquantized["output 0"], actual["output 0"]) < oracle.QUANTIZED_DB
    oracle.check(oracle.run(block, block.separate, x, residual), actual, oracle.SAME_BYTES_DB)


@oracle.BUILDERS
def test_gradients_that_are_expanded_or_absent(build) -> None:
    """A sum's gradient has strides of zero; an output that nobody used has none."""
    block, x, residual = converted_model(build()), oracle.tokens(7).requires_grad_(), oracle.tokens(7)
    (summed,) = torch.autograd.grad(block(x, residual)[0].sum(), x)
    y, *_ = block(x, residual)
    assert torch.equal(torch.autograd.grad(y, x, torch.ones_like(y))[0], summed)
    dtotal = torch.randn(7, 64)
    block(x, residual)[-1].backward(dtotal)
    assert torch.equal(x.grad, dtotal)
    assert not any(p.grad.any() for p in block.parameters())


@pytest.mark.parametrize("shape", [(6, 64), (2, 3, 64)])
@oracle.BUILDERS
def test_gradients_of_x_and_of_the_residual_add_up_apart(build, shape: tuple[int, ...]) -> None:
    """They are equal, but must not be one tensor: leaves add later gradients in place."""
    block, (x, residual) = converted_model(build()), (oracle.tokens(6).view(shape).requires_grad_() for _ in range(2))
    for _ in range(3):
        block(x, residual)[0].square().sum().backward()
    (once,) = torch.autograd.grad(block(x, residual)[0].square().sum(), x)
    torch.testing.assert_close(x.grad, 3 * once)
    torch.testing.assert_close(residual.grad, 3 * once)


@pytest.mark.parametrize(
    ("build", "bad"), [(oracle.linears, torch.inf), (oracle.swiglu, torch.nan), (oracle.gelu, torch.inf)]
)
def test_a_non_finite_value_never_turns_into_a_number(build, bad: float) -> None:
    block, x = converted_model(build()), oracle.tokens(33)
    x[2, 3] = bad
    y = oracle.run(block, block, x)["output 0"]
    assert not y[2].isfinite().any()
    assert y[[0, 1, *range(3, 33)]].isfinite().all()
    x[2, 3] = 0
    x.requires_grad_()
    y, *_ = block(x)
    dy = torch.randn_like(y)
    dy[4, 1] = bad
    y.backward(dy)
    assert not x.grad[4].isfinite().any()
    assert x.grad[[*range(4), *range(5, 33)]].isfinite().all()
    assert not any(p.grad.isfinite().all() for name, p in block.named_parameters() if name.endswith("weight"))


def test_the_gradient_of_a_bias_is_rounded_to_its_own_dtype_alone() -> None:
    """The sum, 301, has no BF16."""
    assert bias_gradient(torch.ones(301, 2, dtype=torch.bfloat16), (torch.float32,)).tolist() == [301.0, 301.0]


def test_layers_with_and_without_a_bias_side_by_side() -> None:
    block = converted_model(oracle.NormThenLinears(oracle.make_norm("rms", 64), 64, (40, 17, 1), (False, True, False)))
    x = oracle.tokens(7)
    oracle.check(oracle.exact(block, x, None, torch.float32), oracle.run(block, block, x), oracle.FLOAT32_DB)


def test_a_low_precision_delta_leaves_the_stream_as_precise_as_it_was() -> None:
    """As plain PyTorch adds, whichever of the two is the wider, and whichever is called residual."""
    block, wide, narrow = converted_model(oracle.swiglu()), oracle.tokens(7), oracle.tokens(7, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        for pair in ((wide, narrow), (narrow, wide)):
            total = block(*pair)[1]
            assert total.dtype == torch.float32
            assert torch.equal(total, wide + narrow)


# ---- The fused modules as a program uses them: compiled, checkpointed, copied, frozen, with hooks


@oracle.BUILDERS
def test_frozen_parts_get_no_gradient_and_change_none(build) -> None:
    block, x = converted_model(build()), oracle.tokens(33)
    expected = oracle.run(block, block, x)
    for frozen in ["x", *dict(block.named_parameters())]:
        block.requires_grad_(True).zero_grad()
        leaf = x.clone().requires_grad_()
        leaves = {"x": leaf} | dict(block.named_parameters())
        leaves[frozen].requires_grad_(False)
        *outputs, total = block(leaf)
        outputs = [*outputs, total] if frozen != "x" else outputs
        torch.autograd.backward(outputs, oracle.output_gradients(tuple(outputs)))
        actual = {f"d {name}": p.grad for name, p in leaves.items()}
        assert actual.pop(f"d {frozen}") is None
        for name, gradient in actual.items():
            assert torch.equal(gradient, expected[name]), (frozen, name)


def test_saved_for_backward_are_the_stream_and_the_output_of_the_inner_layers() -> None:
    """And the parameters, and scales: no bytes of n, h or w."""
    block, x, residual = converted_model(oracle.swiglu()), oracle.tokens(33), oracle.tokens(33)
    saved = saved_tensors(lambda: block(x, residual))
    parameters = {p.data_ptr() for p in block.parameters()}
    large = [t for t in saved if t.data_ptr() not in parameters and t.shape[-1] != 1]
    assert sorted((tuple(t.shape), t.element_size()) for t in large) == [((33, 64), 4), ((33, 192), 4)]


@pytest.mark.parametrize("build", [oracle.swiglu, oracle.gelu, oracle.geglu])
@pytest.mark.parametrize("kind", ["rms", "layer", "none"])
def test_the_input_of_the_activation_is_computed_again_to_the_same_bits(build, kind: str) -> None:
    block, x = converted_model(build(kind, bias=True)), oracle.tokens(33)
    residual = None if kind == "none" else oracle.tokens(33)
    expected = oracle.run(block, block, x, residual)
    block.zero_grad()
    assert "hidden input recomputed" in octavo.convert(block, recompute=True).fused["mlp"]
    oracle.check_equal(expected, oracle.run(block, block, x, residual))
    saved, parameters = saved_tensors(lambda: block(x, residual)), {p.data_ptr() for p in block.parameters()}
    large = [t for t in saved if t.data_ptr() not in parameters and t.shape[-1] != 1 and t.ndim > 1]
    assert sorted(tuple(t.shape) for t in large) == [(33, 64)] * (1 if kind == "none" else 2)
    octavo.convert(block)
    u = (33, 96 if build is oracle.gelu else 192)
    assert any(t.shape == u for t in saved_tensors(lambda: block(x, residual)))


# ---- When a norm and its layers, or an MLP, run as one function, and when layer by layer


@oracle.BUILDERS
def test_unconverted_it_is_plain_pytorch(build) -> None:
    block, x, residual = build(), oracle.tokens(7), oracle.tokens(7)
    assert not any(name.startswith("octavo::") for name in operations(lambda: block(x, residual)))
    oracle.check_equal(oracle.run(block, block.separate, x, residual), oracle.run(block, block, x, residual))
    oracle.check_equal(oracle.run(block, block.separate, x), oracle.run(block, block, x))


def check_unfused(block: oracle.Block) -> None:
    other, x, residual = copy.deepcopy(block), oracle.tokens(33), oracle.tokens(33)
    assert not oracle.is_fused(copy.deepcopy(block), x)
    for seed in range(2):  # the second pass of `delayed` scales by its history
        torch.manual_seed(seed)
        expected = oracle.run(other, other.separate, x, residual)
        torch.manual_seed(seed)
        oracle.check_equal(expected, oracle.run(block, block, x, residual))
        octavo.scales.update_scales(block)
        octavo.scales.update_scales(other)


@pytest.mark.parametrize("recipe", [name for name in octavo.recipe.PRESETS if name != "rowwise"])
@pytest.mark.parametrize("build", [oracle.linears, oracle.swiglu])
def test_a_recipe_that_is_not_fusable_runs_layer_by_layer(build, recipe: str) -> None:
    check_unfused(converted_model(build(), recipe))


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
    block = {"layers": oracle.linears, "mlp.fc": oracle.gelu}.get(odd[:6], oracle.swiglu)()
    octavo.convert(block, skip=(odd,))
    if other != "skipped":
        holder, _, name = odd.rpartition(".")
        parent = nn.ModuleDict({name: block.get_submodule(odd)})
        octavo.convert(parent, rowwise("e5m2") if "e5m2" in other else other)
    check_unfused(block)


def test_gradients_in_e5m2_are_fused_too() -> None:
    block, x, residual = converted_model(oracle.swiglu(), rowwise("e5m2")), oracle.tokens(130), oracle.tokens(130)
    assert oracle.is_fused(block, x)
    expected = oracle.run(block, block.separate, x, residual)
    oracle.check(expected, oracle.run(block, block, x, residual), 40)  # dB, of two ways through the same bytes


class OwnNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().mean(-1, keepdim=True)


@pytest.mark.parametrize(
    "norm", [OwnNorm(), nn.LayerNorm(64, elementwise_affine=False), nn.RMSNorm(64, elementwise_affine=False)]
)
def test_a_norm_of_another_kind_runs_by_itself(norm: nn.Module) -> None:
    for block in (oracle.NormThenLinears(norm, 64, (40, 17), (True, True)), oracle.NormThenMLP(norm, SwiGLU(64, 96))):
        check_unfused(converted_model(block))


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
