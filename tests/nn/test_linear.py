"""The linear layer: its three GEMMs against float64 on the same quantized operands, and every way it is used."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo import ops
from octavo.numerics import ROW, Cast
from octavo.recipe import Gemm, Recipe, rowwise

T, K, N = 96, 80, 112
QUANTIZED = [name for name in octavo.PRESETS if name != "bf16"]


def converted(recipe: str | Recipe, bias: bool = False, k: int = K, n: int = N) -> octavo.Linear:
    linear = nn.Linear(k, n, bias=bias)
    octavo.convert(nn.Sequential(linear), recipe)
    return linear


def run(linear: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = linear(x)
    dx, dw = torch.autograd.grad(y, [x, linear.weight], dy)
    return y.detach(), dx, dw


def sqnr(exact: Tensor, got: Tensor) -> float:
    noise = (exact.double() - got.double()).square().sum()
    return float(10 * torch.log10(exact.double().square().sum() / noise))


def worst_row(exact: Tensor, got: Tensor) -> float:
    """The largest relative error of a row."""
    return float(((got.double() - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-300)).max())


def exact_gradients(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, w, dy = x.double(), w.double(), dy.double()
    return x @ w.t(), dy @ w, dy.t() @ x


@pytest.mark.parametrize(("t", "k", "n"), [(96, 80, 112), (1, 1, 1), (33, 17, 5)])
def test_rowwise_is_the_formula_of_its_operands(t: int, k: int, n: int) -> None:
    """y, dx and dw against float64 products of the very bytes and scales that the formulas name."""
    linear = converted("rowwise", k=k, n=n)
    x, dy = torch.randn(t, k), torch.randn(t, n) * torch.randn(t, 1).exp()
    y, dx, dw = run(linear, x, dy)
    recipe = rowwise()
    x_q, w_q = ops.quantize(x, recipe.x), ops.quantize(linear.weight.detach(), recipe.w)
    mantissa, exponent = torch.frexp(x_q.scale)
    g_q = ops.quantize(dy * w_q.scale.t() * (2 * mantissa), recipe.dy)
    assert worst_row(x_q.dequantize(torch.float64) @ w_q.dequantize(torch.float64).t(), y) < 1e-6
    assert worst_row(g_q.dequantize(torch.float64) / (2 * mantissa.double()) @ w_q.data.double(), dx) < 1e-6
    c = (torch.exp2(exponent - 1.0) * g_q.scale).double()
    h = (g_q.data.double() * (c / c.max())).float().clamp(-448, 448).to(torch.float8_e4m3fn).double()  # [T,N]
    exact = h.t() @ x_q.data.double() * (c.max() / w_q.scale.double())
    assert worst_row(exact, dw) < 1e-6


def separately_by_row(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The usual answer: every operand of every GEMM quantized by row along its own reduction, float32 scales."""

    def q(t: Tensor) -> Tensor:
        scale = t.abs().amax(1, keepdim=True) / 448
        return (t / scale).to(torch.float8_e4m3fn).double() * scale

    return q(x) @ q(w).t(), q(dy) @ q(w.t()).t(), q(dy.t()) @ q(x.t()).t()


@pytest.mark.parametrize("kind", ["gaussian", "log-normal channels", "scaled tokens"])
@pytest.mark.parametrize(("t", "k", "n"), [(1024, 512, 768), (513, 387, 259)])
def test_rowwise_keeps_the_accuracy_of_separate_row_scaling(kind: str, t: int, k: int, n: int) -> None:
    x, w, dy = torch.randn(t, k), torch.randn(n, k) * 0.02, torch.randn(t, n) * 1e-3
    if kind == "log-normal channels":
        x *= torch.randn(1, k).exp()
    if kind == "scaled tokens":  # over eight binades each; were one token to dominate dw: docs/decisions.md
        x *= torch.exp2(8 * torch.rand(t, 1))
        dy *= torch.exp2(8 * torch.rand(t, 1))
    linear = converted("rowwise", k=k, n=n)
    linear.weight.data.copy_(w)
    exact = exact_gradients(x, w, dy)
    ours, usual = run(linear, x, dy), separately_by_row(x, w, dy)
    for name, e, o, u in zip(("y", "dx", "dw"), exact, ours, usual, strict=True):
        assert sqnr(e, o) > sqnr(e, u) - 0.5, name


@pytest.mark.parametrize(
    ("recipe", "floor"), [(r, (27, 23, 23) if r in ("tensorwise", "delayed") else (27, 27, 27)) for r in QUANTIZED]
)
def test_every_recipe_is_near_the_exact_product(recipe: str, floor: tuple[float, float, float]) -> None:
    linear = converted(recipe)
    x, dy = torch.randn(T, K), torch.randn(T, N) * 1e-3
    exact = exact_gradients(x, linear.weight.detach(), dy)
    for _ in range(2):  # the second pass of `delayed` scales by its history
        for e, o, least in zip(exact, run(linear, x, dy), floor, strict=True):
            assert least < sqnr(e, o)
        octavo.update_scales(nn.Sequential(linear))
    assert sqnr(exact[0], run(linear, x, dy)[0]) < 40  # it was quantized


def test_gradients_of_1e_10_keep_their_relative_error() -> None:
    linear, x, dy = converted("rowwise"), torch.randn(T, K), torch.randn(T, N)
    _, _, dw_exact = exact_gradients(x, linear.weight.detach(), dy)
    _, dx, dw = run(linear, x, dy)
    _, dx_tiny, dw_tiny = run(linear, x, dy * 2.0**-33)
    assert torch.equal(dx_tiny, dx * 2.0**-33)
    assert torch.equal(dw_tiny, dw * 2.0**-33)
    assert sqnr(dw_exact, dw) > 27


def test_an_all_zero_weight_and_zero_rows_learn() -> None:
    """Rows of w that are zero have no part in dx, but their dw must be as good as any other's."""
    x, dy = torch.randn(T, K), torch.randn(T, N)
    for zeroed in (slice(None), slice(0, 7)):
        linear = converted("rowwise")
        linear.weight.data[zeroed] = 0
        dw = run(linear, x, dy)[2]
        exact = exact_gradients(x, linear.weight.detach(), dy)[2]
        assert sqnr(exact[zeroed], dw[zeroed]) > 24


def test_all_zero_tokens_and_gradients_give_zeros_not_nan() -> None:
    linear, x, dy = converted("rowwise"), torch.randn(T, K), torch.randn(T, N)
    x[3], dy[5], dy[:, 2] = 0, 0, 0
    y, dx, dw = run(linear, x, dy)
    assert not y[3].any()
    assert not dx[5].any()
    assert not dw[2].any()
    y, dx, dw = run(linear, torch.zeros(T, K), torch.zeros(T, N))
    assert not y.any()
    assert not dx.any()
    assert not dw.any()


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_non_finite_value_never_turns_into_a_number(recipe: str, bad: float) -> None:
    linear = converted(recipe)
    for _ in range(2):
        x, dy = torch.randn(T, K), torch.randn(T, N)
        run(linear, x, dy)
        octavo.update_scales(nn.Sequential(linear))
    y, _, dw = run(linear, x.index_put((torch.tensor(2), torch.tensor(3)), torch.tensor(bad)), dy)
    assert not y[2].isfinite().any()
    assert not dw[:, 3].isfinite().any()
    _, dx, dw = run(linear, x, dy.index_put((torch.tensor(4), torch.tensor(1)), torch.tensor(bad)))
    assert not dx[4].isfinite().any()
    assert not dw[1].isfinite().any()


@pytest.mark.parametrize("recipe", list(octavo.PRESETS))
def test_any_rank_and_no_rows(recipe: str) -> None:
    linear = converted(recipe, bias=True)
    x = torch.randn(2, 3, 4, K)
    assert torch.equal(linear(x), linear(x.view(-1, K)).view(2, 3, 4, N))
    assert linear(x[0, 0, 0]).shape == (N,)
    empty = torch.randn(0, K, requires_grad=True)
    y = linear(empty)
    assert y.shape == (0, N)
    y.sum().backward()
    assert empty.grad is not None
    assert not linear.weight.grad.any()


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_autocast_sets_the_output_dtype_and_nothing_else(recipe: str) -> None:
    """Inside autocast the float32 arithmetic of the operations must stay float32."""
    linear = converted(recipe, bias=True)
    x = torch.randn(T, K, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, linear(x).bfloat16())
    y.float().sum().backward()
    assert x.grad.dtype == linear.weight.grad.dtype == linear.bias.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_follow_input_and_parameters(dtype: torch.dtype) -> None:
    linear = converted("rowwise", bias=True).to(dtype)
    x = torch.randn(T, K, dtype=dtype, requires_grad=True)
    linear(x).sum().backward()
    assert linear(x).dtype == x.grad.dtype == linear.weight.grad.dtype == linear.bias.grad.dtype == dtype


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
    linear = converted(recipe)
    parts = [(torch.randn(T, K), torch.randn(T, N) * 1e-4) for _ in range(8)]
    for x, dy in parts:
        linear(x).backward(dy)
    assert linear.weight.grad.dtype == torch.float32
    fresh = converted(recipe)
    fresh.weight = nn.Parameter(linear.weight.detach().clone())
    each = [run(fresh, x, dy)[2].double() for x, dy in parts]
    torch.testing.assert_close(linear.weight.grad.double(), torch.stack(each).sum(0), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("recipe", list(octavo.PRESETS))
def test_checkpointed_activations_give_the_same_gradients(recipe: str) -> None:
    linear = converted(recipe)
    for _ in range(2):
        x, dy = torch.randn(T, K, requires_grad=True), torch.randn(T, N)
        linear(x).backward(dy)
        plain = x.grad.clone(), linear.weight.grad.clone()
        x.grad = linear.weight.grad = None
        checkpoint(linear, x, use_reentrant=False).backward(dy)
        assert torch.equal(x.grad, plain[0])
        assert torch.equal(linear.weight.grad, plain[1])
        linear.weight.grad = None
        octavo.update_scales(nn.Sequential(linear))


@pytest.mark.parametrize("recipe", list(octavo.PRESETS))
def test_compiled_equals_eager_in_one_graph(recipe: str) -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, 48))
    octavo.convert(model, recipe)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    start = octavo.scale_state(model)
    start = {name: t.clone() for name, t in start.items()}

    def train(forward: nn.Module) -> list[Tensor]:
        octavo.load_scale_state(model, start)
        seen = []
        for i in range(3):
            torch.manual_seed(i)
            x = torch.randn(8, 4, K, requires_grad=True)
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                y = forward(x)
            y.float().square().mean().backward()
            octavo.update_scales(model)
            seen += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        return seen + [t.clone() for t in octavo.scale_state(model).values()]

    for a, b in zip(train(model), train(compiled), strict=True):
        assert torch.equal(a, b)


def test_delayed_scaling_is_compiled_twice_not_every_step() -> None:
    """Once for the dynamic first step, once for all that follow."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(K, N))
    octavo.convert(model, "delayed")
    graphs = []
    compiled = torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for _ in range(5):
        compiled(torch.randn(T, K)).sum().backward()
        octavo.update_scales(model)
    assert len(graphs) == 2


def test_compiled_by_inductor() -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, 48))
    octavo.convert(model, "rowwise")
    x = torch.randn(T, K)
    y = torch.compile(model, fullgraph=True)(x)
    torch.testing.assert_close(y, model(x), rtol=2e-2, atol=2e-2)


def test_frozen_parts_are_not_computed_or_saved() -> None:
    """LoRA-like: a frozen weight gets no gradient, and the layer then keeps neither x nor its bytes."""
    linear = converted("rowwise")
    linear.weight.requires_grad_(False)
    x = torch.randn(T, K, requires_grad=True)
    kept: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = linear(x)
    assert torch.Size([T, K]) not in kept
    y.sum().backward()
    assert linear.weight.grad is None
    trained = converted("rowwise")
    dy = torch.randn(T, N)
    (dx,) = torch.autograd.grad(linear(x), x, dy)
    assert sqnr(exact_gradients(x.detach(), linear.weight, dy)[1], dx) > 27
    trained(x.detach()).sum().backward()  # no dx wanted
    assert trained.weight.grad is not None


def test_saved_activations_are_one_byte_an_element() -> None:
    linear, x = converted("rowwise"), torch.randn(T, K)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(x)
    of_x = [t for t in kept if t.shape == (T, K)]
    assert [t.element_size() for t in of_x] == [1]


def test_tied_weights_collect_both_gradients() -> None:
    first, second = converted("rowwise", k=64, n=64), converted("rowwise", k=64, n=64)
    second.weight = first.weight
    x = torch.randn(T, 64)
    second(first(x)).square().mean().backward()
    grad = first.weight.grad.clone()
    first.weight.grad = None
    hidden = first(x)
    leaf = hidden.detach().requires_grad_()
    second(leaf).square().mean().backward()
    hidden.backward(leaf.grad)
    torch.testing.assert_close(first.weight.grad, grad)


def test_rotation_undoes_itself_across_the_layer() -> None:
    linear = converted(replace(rowwise(), rotate=True), k=96)
    x, dy = torch.randn(T, 96), torch.randn(T, N)
    for e, o in zip(exact_gradients(x, linear.weight.detach(), dy), run(linear, x, dy), strict=True):
        assert sqnr(e, o) > 27


def test_rotation_saves_the_other_tokens_from_an_outlier() -> None:
    """One element of 2^20 takes the range of a tensor-wide scale: the other tokens vanish, but for a rotation."""
    x, dy = torch.randn(T, 128), torch.randn(T, N)
    x[0, 5] = 2.0**20
    recipe = octavo.PRESETS["tensorwise"]()
    plain, rotated = converted(recipe, k=128), converted(replace(recipe, rotate=True), k=128)
    rotated.weight = plain.weight
    exact = exact_gradients(x, plain.weight.detach(), dy)[0][1:]
    assert sqnr(exact, run(plain, x, dy)[0][1:]) < 1
    assert sqnr(exact, run(rotated, x, dy)[0][1:]) > 15


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
    w_q = ops.quantize(linear.weight.detach(), recipe.w)
    exact = dy.double() @ w_q.dequantize(torch.float64)
    mean = torch.stack([run(linear, x, dy)[1] for _ in range(200)]).double().mean(0)
    assert sqnr(exact, mean) > sqnr(exact, first) + 18  # 23 dB less noise if independent and unbiased


def test_a_gemm_without_casts_runs_in_high_precision() -> None:
    row = Cast(granularity=ROW, scale="pow2")
    only_forward = Recipe("forward", y=Gemm(row, row))
    linear, x, dy = converted(only_forward), torch.randn(T, K), torch.randn(T, N)
    exact = exact_gradients(x, linear.weight.detach(), dy)
    y, dx, dw = run(linear, x, dy)
    assert sqnr(exact[0], y) < 40
    assert sqnr(exact[1], dx) > 100
    assert sqnr(exact[2], dw) > 100
