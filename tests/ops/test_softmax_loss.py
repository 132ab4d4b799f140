"""The cross-entropy of rows of logits against float64: the reference, and the kernel in the interpreter."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.formats import E4M3
from octavo.ops import softmax_loss as op
from octavo.ops.softmax_loss import IGNORED, cross_entropy, cross_entropy_gradient, multiply

FACTOR = 0.125
FORMULAS = {"plain": (1.0, 0.0), "scaled": (0.0625, 0.0), "capped": (1 / 30, 30.0)}
COLUMNS = [7, 128, 1000, 33_000]  # the longest takes two blocks


def example(columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    z = (8 * torch.randn(5, columns)).to(dtype)
    labels = torch.randint(columns, (5,))
    labels[3] = IGNORED
    z[3] = torch.nan  # the row of padding may hold anything
    return z, labels


def exact(z: Tensor, labels: Tensor, scale: float, cap: float) -> tuple[Tensor, Tensor]:
    """The losses of the rows and the gradient of their sum, by autograd in float64."""
    wide = z.nan_to_num(0.0).double().requires_grad_()
    y = cap * torch.tanh(scale * wide) if cap else scale * wide
    losses = F.cross_entropy(y, labels, ignore_index=IGNORED, reduction="none")
    (losses.sum() * FACTOR).backward()
    return losses.detach(), wide.grad


def by_reference(z: Tensor, labels: Tensor, scale: float, cap: float) -> tuple[Tensor, ...]:
    z = z.clone()
    factor = torch.tensor(FACTOR, dtype=torch.promote_types(z.dtype, torch.float32))
    return z, *op.cross_entropy_reference(z, labels, factor, None, scale, cap)


def by_kernel(z: Tensor, labels: Tensor, scale: float, cap: float) -> tuple[Tensor, ...]:
    """Run in the interpreter."""
    from octavo.ops.kernels.softmax_loss import cross_entropy as kernel

    z = z.clone()
    return z, *kernel(z, labels, torch.tensor(FACTOR), None, scale, cap)


def quantized_by_reference(z: Tensor, labels: Tensor, *formula: float) -> tuple[Tensor, ...]:
    """g by row and transposed, from logits that are left as they are."""
    given = z.clone()
    found = op.cross_entropy_reference(z, labels, None, None, *formula)
    results = op.cross_entropy_gradient_reference(z, labels, torch.tensor(FACTOR), *found, *formula, True, True)
    assert torch.equal(z.nan_to_num(), given.nan_to_num())
    return results


def quantized_by_kernel(z: Tensor, labels: Tensor, *formula: float) -> tuple[Tensor, ...]:
    from octavo.ops.kernels.softmax_loss import cross_entropy as kernel
    from octavo.ops.kernels.softmax_loss import cross_entropy_gradient as gradient

    return gradient(z, labels, torch.tensor(FACTOR), *kernel(z, labels, None, None, *formula), *formula, True, True)


def either(reference, kernel):
    """A fixture: `reference`, and `kernel` in the interpreter."""

    @pytest.fixture(params=["reference", pytest.param("kernel", marks=pytest.mark.triton)])
    def chosen(request):
        if request.param == "reference":
            return reference
        pool = request.getfixturevalue("kernels")
        return lambda *args: pool.submit(kernel, *args).result()

    return chosen


run, quantized = either(by_reference, by_kernel), either(quantized_by_reference, quantized_by_kernel)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize(("scale", "cap"), FORMULAS.values(), ids=FORMULAS)
def test_losses_and_gradient_are_those_of_float64(run, scale, cap, columns):
    z, labels = example(columns)
    losses, gradient = exact(z, labels, scale, cap)
    g, lse, picked = run(z, labels, scale, cap)
    torch.testing.assert_close((lse - picked).double(), losses, rtol=2e-6, atol=1e-6)
    assert float((g - gradient).abs().max()) < 2e-6 * float(gradient.abs().max())
    assert not g[3].any()


def test_a_first_block_of_masked_logits(run):
    z, labels = example(33_000)
    z[0, :32_768], labels[0] = -torch.inf, 32_900
    losses, gradient = (x[0].float() for x in exact(z.clamp(min=-1e30), labels, 1.0, 0.0))
    g, lse, picked = run(z, labels, 1.0, 0.0)
    torch.testing.assert_close(lse[0] - picked[0], losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(g[0], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("columns", [7, 1000])
def test_in_bf16_the_gradient_is_rounded_once(run, columns):
    z, labels = example(columns, torch.bfloat16)
    _, gradient = exact(z, labels, 1.0, 0.0)
    g, *_ = run(z, labels, 1.0, 0.0)
    assert g.dtype == torch.bfloat16
    rounding = 2**-8 if run is by_reference else 2**-7  # the interpreter cuts off
    assert ((g.double() - gradient).abs() <= gradient.abs() * (rounding + 1e-5) + 1e-12).all()


@pytest.mark.parametrize("columns", [7, 1000])
@pytest.mark.parametrize(("scale", "cap"), FORMULAS.values(), ids=FORMULAS)
def test_in_fp8_a_row_and_a_column_reach_the_largest_number(quantized, scale, cap, columns):
    z, labels = example(columns)
    _, gradient = exact(z, labels, scale, cap)
    data, scales, data_t, scale_t = quantized(z, labels, scale, cap)
    assert (data.dtype, scales.shape) == (E4M3.dtype, (5, 1))
    assert (data_t.dtype, scale_t.shape) == (E4M3.dtype, (columns, 1))
    live = labels != IGNORED
    largest = data.float()[live].abs().amax(1)
    assert (largest <= E4M3.max).all()
    assert cap or (largest == E4M3.max).all()
    assert (data_t.float().abs().amax(1) == E4M3.max).all()
    assert not data.float()[3].any()
    for found, by, expected in ((data, scales, gradient), (data_t, scale_t, gradient.t())):
        spacing = torch.maximum(expected.abs() / 8, by.double() * 2**-9)  # of the numbers around, at most
        wrong = (found.float() * by.double() - expected).abs() > 0.51 * spacing
        # The interpreter casts some numbers wrongly (test_on_a_gpu_it_is_the_reference has the bytes).
        assert float(wrong.double().mean()) <= (0.0 if quantized is quantized_by_reference else 0.5)


@pytest.mark.parametrize(("by_row", "by_column"), [(True, False), (False, True)])
def test_what_is_not_wanted_is_none(by_row, by_column):
    z, labels = example(40)
    lse, picked = cross_entropy(z, labels, None, None, 1.0, 0.0)
    found = cross_entropy_gradient(z, labels, torch.tensor(FACTOR), lse, picked, 1.0, 0.0, by_row, by_column)
    whole = quantized_by_reference(z, labels, 1.0, 0.0)
    for wanted, each, expected in zip((by_row, by_row, by_column, by_column), found, whole, strict=True):
        assert (each is not None and torch.equal(each.float(), expected.float())) if wanted else each is None


@pytest.mark.parametrize(("scale", "cap"), FORMULAS.values(), ids=FORMULAS)
def test_parts_of_the_vocabulary_give_the_gradient_of_the_whole(scale, cap):
    z, labels = example(1000)
    z = z.nan_to_num(0.0)
    whole, *_ = by_reference(z, labels, scale, cap)
    parts, ignored = [part.clone() for part in z.split(400, 1)], labels == IGNORED
    own = [(labels - first).masked_fill(ignored, IGNORED) for first in (0, 400, 800)]
    found = [cross_entropy(part, each, None, None, scale, cap) for part, each in zip(parts, own, strict=True)]
    lses, picked = zip(*found, strict=True)
    lse = torch.logsumexp(torch.stack(lses), 0)
    for part, each in zip(parts, own, strict=True):
        cross_entropy(part, each, torch.tensor(FACTOR), lse, scale, cap)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    losses, _ = exact(z, labels, scale, cap)
    torch.testing.assert_close((lse - sum(picked))[~ignored].double(), losses[~ignored], rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scale", "cap"), FORMULAS.values(), ids=FORMULAS)
@pytest.mark.parametrize("columns", [*COLUMNS, 128_256])
def test_on_a_gpu_it_is_the_reference(columns, scale, cap, dtype):
    z, labels = example(columns, dtype)
    expected, wide = by_reference(z, labels, scale, cap), quantized_by_reference(z, labels, scale, cap)
    z, labels, factor = z.cuda(), labels.cuda(), torch.tensor(FACTOR).cuda()
    lse, picked = cross_entropy(z, labels, None, None, scale, cap)
    quantized = cross_entropy_gradient(z, labels, factor, lse, picked, scale, cap, True, True)
    again = cross_entropy(z, labels, factor, None, scale, cap)
    live = (labels != IGNORED).cpu()
    # Of numbers down to e^-90, whose logit is rounded in float32
    step = {torch.float32: 3e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    smallest = 2**-24 if dtype == torch.float16 else 1e-30
    assert ((z.cpu().float() - expected[0].float()).abs() <= step * expected[0].float().abs() + smallest).all()
    torch.testing.assert_close(lse, again[0], rtol=1e-6, atol=0)  # by other blocks
    assert torch.equal(picked[live], again[1][live])
    torch.testing.assert_close(lse.cpu()[live], expected[1][live], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(picked.cpu()[live], expected[2][live], rtol=2e-6, atol=2e-6)
    for i in (0, 2):  # by row, and transposed
        torch.testing.assert_close(quantized[i + 1].cpu(), wide[i + 1], rtol=1e-5, atol=0)
        found, data = quantized[i].cpu().float(), wide[i].float()
        assert ((found - data).abs() <= (data.abs() / 8).clamp(min=2**-9)).all()  # at most a step
        assert float((found != data).float().mean()) < 1e-3


@pytest.mark.gpu
def test_on_a_gpu_it_computes_the_same_in_every_run():
    z = 4 * torch.randn(512, 128_256, device="cuda", dtype=torch.bfloat16)
    labels, factor = torch.randint(128_256, (512,), device="cuda"), torch.tensor(1.0, device="cuda")
    first = None
    for _ in range(20):
        g = z.clone()
        lse, picked = cross_entropy(g, labels, None, None, 1.0, 0.0)
        data, _, data_t, _ = cross_entropy_gradient(g, labels, factor, lse, picked, 1.0, 0.0, True, True)
        cross_entropy(g, labels, factor, None, 1.0, 0.0)
        results = [g, lse, data.view(torch.uint8), data_t.view(torch.uint8)]
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multiply_rounds_once_on_a_gpu(dtype, factor):
    x = torch.randn(3000, 1001, dtype=dtype)
    found = x.cuda()
    multiply(found, torch.tensor(factor, device="cuda"))
    assert torch.equal(found.cpu(), (x.float() * torch.tensor(factor)).to(dtype))
