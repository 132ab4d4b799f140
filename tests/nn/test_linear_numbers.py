"""The three GEMMs of the linear layer against float64: on the same quantized operands, and on exact ones."""

import itertools
from dataclasses import replace

import pytest
import scipy.linalg
import torch
from fused_oracle import Product
from gemm_examples import worst_row
from linear_examples import FOUR_BITS, FOUR_BITS_DB, QUANTIZED, K, N, T, converted, exact_gradients, run, without_chance
from metrics import sqnr
from operation_counts import saved_tensors
from torch import Tensor, nn

import octavo
from octavo import ops
from octavo.numerics.qtensor import Cast, parse_granularity
from octavo.numerics.scaling import scattered_signs
from octavo.recipe import GEMMS, Gemm, Recipe, blockwise, get_recipe, mxfp8, rowwise, tensorwise

# Limits in dB of sqnr against the exact product.
E4M3_DB = 27  # at least, with both operands in e4m3
E5M2_DB = 23  # at least, with gradients in e5m2
QUANTIZED_DB = 40  # at most, with anything quantized


@pytest.mark.parametrize(("t", "k", "n"), [(96, 80, 112), (1, 1, 1), (33, 17, 5)])
def test_rowwise_is_the_formula_of_its_operands(t: int, k: int, n: int) -> None:
    """y, dx and dw against float64 products of the very bytes and scales that the formulas name."""
    linear = converted("rowwise", k=k, n=n)
    x, dy = torch.randn(t, k), torch.randn(t, n) * torch.randn(t, 1).exp()
    product = Product(x, {"linear": linear})
    dx, gradients = product.backward(dy, torch.float32)
    for found, exact in zip(run(linear, x, dy), (product.y, dx, gradients["d linear.weight"]), strict=True):
        assert worst_row(found, exact.numpy()) < 1e-6


@pytest.mark.parametrize("granularity", ["row", "tensor", "block:16x16"])
def test_an_exact_backward_pass_is_the_gradient_of_the_numbers_that_y_multiplied(granularity: str) -> None:
    """y, dx and dw against float64 products of the same bytes."""
    cast = Cast("e4m3", parse_granularity(granularity))
    linear = converted(Recipe("mine", Gemm(cast, cast), exact_backward=True), bias=True)
    x, dy = torch.randn(T, K) * torch.randn(T, 1).exp(), torch.randn(T, N)
    x_q, w_q = (ops.quantize(t, cast).dequantize(torch.float64) for t in (x, linear.weight.detach()))
    expected = x_q @ w_q.t() + linear.bias.detach().double(), dy.double() @ w_q, dy.double().t() @ x_q
    for found, exact in zip(run(linear, x, dy), expected, strict=True):
        assert worst_row(found, exact.numpy()) < 1e-6
    with octavo.scales.cast_once(linear):
        assert all(torch.equal(a, b) for a, b in zip(run(linear, x, dy), run(linear, x, dy), strict=True))
        assert worst_row(run(linear, x, dy)[1], expected[1].numpy()) < 1e-6


def test_rowwise_forward_saves_the_bytes_and_computes_the_y_of_rowwise() -> None:
    layers, x, found = [converted("rowwise_forward"), converted("rowwise")], torch.randn(T, K, requires_grad=True), []
    layers[1].load_state_dict(layers[0].state_dict())
    for layer in layers:
        saved = saved_tensors(lambda layer=layer: found.append(layer(x)))
        assert [t.dtype for t in saved if t.shape == (T, K)] == [torch.float8_e4m3fn]
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("recipe", "gradients_db"),
    [(r, E5M2_DB if r in ("tensorwise", "tensorwise_rotated", "delayed") else E4M3_DB) for r in QUANTIZED],
)
def test_every_recipe_is_near_the_exact_product(recipe: str, gradients_db: float) -> None:
    linear = converted(recipe)
    x, dy = torch.randn(T, K), torch.randn(T, N) * 1e-3
    exact = exact_gradients(x, linear.weight.detach(), dy)
    for _ in range(2):  # the second pass of `delayed` scales by its history
        limits = [FOUR_BITS_DB] * 3 if recipe in FOUR_BITS else (E4M3_DB, gradients_db, gradients_db)
        for e, o, limit in zip(exact, run(linear, x, dy), limits, strict=True):
            assert sqnr(e, o) > limit
        octavo.scales.update_scales(nn.Sequential(linear))
    assert sqnr(exact[0], run(linear, x, dy)[0]) < QUANTIZED_DB


def test_gradients_of_1e_10_keep_their_relative_error() -> None:
    linear, x, dy = converted("rowwise"), torch.randn(T, K), torch.randn(T, N)
    _, _, dw_exact = exact_gradients(x, linear.weight.detach(), dy)
    _, dx, dw = run(linear, x, dy)
    _, dx_tiny, dw_tiny = run(linear, x, dy * 2.0**-33)
    assert torch.equal(dx_tiny, dx * 2.0**-33)
    assert torch.equal(dw_tiny, dw * 2.0**-33)
    assert sqnr(dw_exact, dw) > E4M3_DB


def test_an_all_zero_weight_and_zero_rows_learn() -> None:
    """Rows of w that are zero have no part in dx, but their dw must be as good as any other's."""
    x, dy = torch.randn(T, K), torch.randn(T, N)
    for zeroed in (slice(None), slice(0, 7)):
        linear = converted("rowwise")
        linear.weight.data[zeroed] = 0
        dw = run(linear, x, dy)[2]
        assert sqnr(exact_gradients(x, linear.weight.detach(), dy)[2][zeroed], dw[zeroed]) > E4M3_DB - 3


def test_all_zero_tokens_and_gradients_give_zeros_not_nan() -> None:
    linear, x, dy = converted("rowwise"), torch.randn(T, K), torch.randn(T, N)
    x[3], dy[5], dy[:, 2] = 0, 0, 0
    y, dx, dw = run(linear, x, dy)
    assert not y[3].any()
    assert not dx[5].any()
    assert not dw[2].any()
    for result in run(linear, torch.zeros(T, K), torch.zeros(T, N)):
        assert not result.any()


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_non_finite_value_never_turns_into_a_number(recipe: str, bad: float) -> None:
    linear = converted(recipe)
    for _ in range(2):
        x, dy = torch.randn(T, K), torch.randn(T, N)
        run(linear, x, dy)
        octavo.scales.update_scales(nn.Sequential(linear))
    y, _, dw = run(linear, x.index_put((torch.tensor(2), torch.tensor(3)), torch.tensor(bad)), dy)
    assert not y[2].isfinite().any()
    assert not dw[:, 3].isfinite().any()
    _, dx, dw = run(linear, x, dy.index_put((torch.tensor(4), torch.tensor(1)), torch.tensor(bad)))
    assert not dx[4].isfinite().any()
    assert not dw[1].isfinite().any()
    linear.weight.data[3, 5] = bad
    assert not run(linear, x, dy)[1][:, 5].isfinite().any()


def test_stochastic_rounding_of_gradients_is_unbiased_and_follows_the_seed() -> None:
    c = replace(rowwise().dy, rounding="stochastic")
    recipe = rowwise()
    recipe = Recipe("stochastic", y=recipe.y, dx=replace(recipe.dx, a=c), dw=replace(recipe.dw, a=c))
    linear, x, dy = converted(recipe), torch.randn(T, K), torch.randn(T, N)
    torch.manual_seed(3)
    first = run(linear, x, dy)[1]
    torch.manual_seed(3)
    assert torch.equal(run(linear, x, dy)[1], first)
    assert not torch.equal(run(linear, x, dy)[1], first)
    exact = dy.double() @ ops.quantize(linear.weight.detach(), recipe.w).dequantize(torch.float64)
    mean = torch.stack([run(linear, x, dy)[1] for _ in range(200)]).double().mean(0)
    assert sqnr(exact, mean) > sqnr(exact, first) + 18  # 23 dB less noise if independent and unbiased


def test_bias_and_its_gradient() -> None:
    linear = converted("rowwise", bias=True)
    x, dy = torch.randn(T, K), torch.randn(T, N)
    y = linear(x)
    y.backward(dy)
    plain = converted("rowwise")
    plain.weight = linear.weight
    torch.testing.assert_close(y, plain(x) + linear.bias)
    torch.testing.assert_close(linear.bias.grad, dy.double().sum(0).float())


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_micro_batches_add_up_in_float32(recipe: str) -> None:
    linear = converted(without_chance(recipe))
    parts = [(torch.randn(T, K), torch.randn(T, N) * 1e-4) for _ in range(8)]
    for x, dy in parts:
        linear(x).backward(dy)
    assert linear.weight.grad.dtype == torch.float32
    fresh = converted(without_chance(recipe))
    fresh.weight = nn.Parameter(linear.weight.detach().clone())
    each = [run(fresh, x, dy)[2].double() for x, dy in parts]
    torch.testing.assert_close(linear.weight.grad.double(), torch.stack(each).sum(0), rtol=1e-5, atol=1e-9)


# ---- The cost of folding the scale of w into dy, against quantizing every operand separately by row
#
# The loss is that of dy's power-of-two scales (docs/decisions.md): the largest gradient of a row, which weighs most
# where few channels carry the energy, is rounded, where a float32 scale represents it exactly.


T_FOLD, K_FOLD, N_FOLD, SEEDS = 512, 256, 384, 4

# The recipe -> the dB that y, dx and dw may lose on average, by kind.
MOST = {
    "rowwise": {
        "w rows, sigma 1": (0.05, 0.8, 0.1),
        "w rows, sigma 2": (0.05, 2.2, 0.1),
        "dy channels, sigma 1": (0.05, 0.8, 0.2),
        "dy channels, sigma 2": (0.05, 2.2, 0.4),
        "student": (0.05, 0.6, 0.6),
        "tokens": (0.5, 0.5, 0.5),
    },
    "rowwise_dw_bf16": {
        "w rows, sigma 1": (0.05, 0.2, 0.0),
        "w rows, sigma 2": (0.05, 0.4, 0.0),
        "dy channels, sigma 1": (0.05, 0.2, 0.0),
        "dy channels, sigma 2": (0.05, 0.4, 0.0),
        "student": (0.05, 0.2, 0.0),
    },
}


def make(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    x, w, dy = torch.randn(T_FOLD, K_FOLD), torch.randn(N_FOLD, K_FOLD) * 0.02, torch.randn(T_FOLD, N_FOLD) * 1e-3
    sigma = 2 if "2" in kind else 1
    if kind.startswith("w rows"):
        w *= (sigma * torch.randn(N_FOLD, 1)).exp()
    elif kind.startswith("dy channels"):
        dy *= (sigma * torch.randn(1, N_FOLD)).exp()
    elif kind == "tokens":  # over eight binades each; were one token to dominate dw: docs/decisions.md
        x *= torch.exp2(8 * torch.rand(T_FOLD, 1))
        dy *= torch.exp2(8 * torch.rand(T_FOLD, 1))
    else:
        student = torch.distributions.StudentT(3.0)
        x, w, dy = (student.sample(t.shape) * size for t, size in ((x, 1), (w, 0.02), (dy, 1e-3)))
    return x, w, dy


def separately_by_row(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The usual answer: every operand of every GEMM quantized by row along its own reduction, float32 scales."""

    def q(t: Tensor) -> Tensor:
        scale = t.abs().amax(1, keepdim=True) / 448
        return (t / scale).to(torch.float8_e4m3fn).double() * scale

    return q(x) @ q(w).t(), q(dy) @ q(w.t()).t(), q(dy.t()) @ q(x.t()).t()


@pytest.mark.parametrize(("recipe", "kind"), [(recipe, kind) for recipe, kinds in MOST.items() for kind in kinds])
def test_what_folding_costs_is_bounded(recipe: str, kind: str) -> None:
    losses = torch.zeros(SEEDS, 3)
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        x, w, dy = make(kind)
        exact = exact_gradients(x, w, dy)
        linear = converted(recipe, k=K_FOLD, n=N_FOLD)
        linear.weight.data.copy_(w)
        pairs = zip(exact, separately_by_row(x, w, dy), run(linear, x, dy), strict=True)
        losses[seed] = torch.tensor([sqnr(e, s) - sqnr(e, o) for e, s, o in pairs])
    assert (losses.mean(0) <= torch.tensor(MOST[recipe][kind])).all(), losses.mean(0)


# ---- Recipes that rotate the operands of y, dx and dw along K, N and T


SUBSETS = [chosen for count in (1, 2, 3) for chosen in itertools.combinations(GEMMS, count)]


def rotated(recipe: Recipe, *gemms: str) -> Recipe:
    return replace(recipe, name="rotated", rotate=gemms)


def matrix(n: int) -> torch.Tensor:
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
    a, b = (ops.quantize(t, cast).dequantize(torch.float64) for t, cast in zip(turned, (casts.a, casts.b), strict=True))
    found, others = (dict(zip(GEMMS, run(layer, x, dy), strict=True)) for layer in (linear, plain))
    assert sqnr(a @ b.t(), found[gemm]) > 50  # a tie may round the other way
    unchanged = {"y"} if recipe.dx.b.by_row and gemm != "y" else set(GEMMS) - {gemm}
    assert {name for name in GEMMS if torch.equal(found[name], others[name])} == unchanged


def test_the_preset_has_the_memory_of_tensorwise() -> None:
    x, layers = torch.randn(T, K, requires_grad=True), map(converted, ("tensorwise", "tensorwise_rotated"))
    plain, rotated = (sum(t.nbytes for t in saved_tensors(lambda layer=layer: layer(x))) for layer in layers)
    assert plain == rotated


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
    assert (converted(rotated(rowwise(), *gemms)).cached_weights() is not None) == ("y" not in gemms)
