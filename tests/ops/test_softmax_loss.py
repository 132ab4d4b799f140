"""The cross-entropy of rows of logits against float64: the reference, and the kernel in the interpreter."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.formats import E4M3
from octavo.ops.softmax_loss import IGNORED, cross_entropy, cross_entropy_reference, multiply

FACTOR = 0.125
FORMULAS = {"plain": (1.0, 0.0), "scaled": (0.0625, 0.0), "capped": (1 / 30, 30.0)}
COLUMNS = [7, 128, 1000, 33_000]  # the longest takes two blocks


def example(columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
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


def by_reference(z: Tensor, labels: Tensor, scale: float, cap: float, fp8: bool) -> tuple[Tensor | None, ...]:
    z = z.clone()
    factor = torch.tensor(FACTOR, dtype=torch.promote_types(z.dtype, torch.float32))
    return z, *cross_entropy_reference(z, labels, factor, None, scale, cap, fp8)


def by_kernel(z: Tensor, labels: Tensor, scale: float, cap: float, fp8: bool) -> tuple[Tensor | None, ...]:
    """Run in the interpreter."""
    from octavo.ops.kernels.softmax_loss import cross_entropy as kernel

    z = z.clone()
    return z, *kernel(z, labels, torch.tensor(FACTOR), None, scale, cap, fp8)


@pytest.fixture(params=["reference", pytest.param("kernel", marks=pytest.mark.triton)])
def run(request):
    if request.param == "reference":
        return by_reference
    pool = request.getfixturevalue("kernels")
    return lambda *args: pool.submit(by_kernel, *args).result()


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize(("scale", "cap"), FORMULAS.values(), ids=FORMULAS)
def test_losses_and_gradient_are_those_of_float64(run, scale, cap, columns):
    z, labels = example(columns)
    losses, gradient = exact(z, labels, scale, cap)
    g, lse, picked, _, _ = run(z, labels, scale, cap, False)
    torch.testing.assert_close((lse - picked).double(), losses, rtol=2e-6, atol=1e-6)
    assert float((g - gradient).abs().max()) < 2e-6 * float(gradient.abs().max())
    assert not g[3].any()


def test_a_first_block_of_masked_logits(run):
    z, labels = example(33_000)
    z[0, :32_768], labels[0] = -torch.inf, 32_900
    losses, gradient = (x[0].float() for x in exact(z.clamp(min=-1e30), labels, 1.0, 0.0))
    g, lse, picked, *_ = run(z, labels, 1.0, 0.0, False)
    torch.testing.assert_close(lse[0] - picked[0], losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(g[0], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("columns", [7, 1000])
def test_in_bf16_the_gradient_is_rounded_once(run, columns):
    z, labels = example(columns, torch.bfloat16)
    _, gradient = exact(z, labels, 1.0, 0.0)
    g, *_ = run(z, labels, 1.0, 0.0, False)
    assert g.dtype == torch.bfloat16
    rounding = 2**-8 if run is by_reference else 2**-7  # the interpreter cuts off
    assert ((g.double() - gradient).abs() <= gradient.abs() * (rounding + 1e-5) + 1e-12).all()


@pytest.mark.parametrize(("scale", "cap"), FORMULAS.values(), ids=FORMULAS)
def test_in_fp8_a_row_reaches_the_largest_number_and_none_lies_beyond(run, scale, cap):
    z, labels = example(1000)
    _, gradient = exact(z, labels, scale, cap)
    *_, data, scales = run(z, labels, scale, cap, True)
    assert (data.dtype, scales.shape) == (E4M3.dtype, (5, 1))
    found = data.float()
    live = labels != IGNORED
    largest = found[live].abs().amax(1)
    assert (largest <= E4M3.max).all()
    assert cap or (largest == E4M3.max).all()
    assert not found[3].any()
    spacing = torch.maximum(gradient.abs() / 8, scales.double() * 2**-9)  # of the numbers around, at most
    wrong = (found * scales.double() - gradient).abs() > 0.51 * spacing
    # The interpreter casts some numbers wrongly (test_on_a_gpu_it_is_the_reference has the bytes).
    assert float(wrong.double().mean()) <= (0.0 if run is by_reference else 0.5)


def test_parts_of_the_vocabulary_give_the_gradient_of_the_whole():
    z, labels = example(1000)
    z = z.nan_to_num(0.0)
    whole, *_ = by_reference(z, labels, 1.0, 0.0, False)
    parts, ignored = [part.clone() for part in z.split(400, 1)], labels == IGNORED
    own = [(labels - first).masked_fill(ignored, IGNORED) for first in (0, 400, 800)]
    found = [cross_entropy(part, each, None, None, 1.0, 0.0, False) for part, each in zip(parts, own, strict=True)]
    lses, picked, *_ = zip(*found, strict=True)
    lse = torch.logsumexp(torch.stack(lses), 0)
    for part, each in zip(parts, own, strict=True):
        cross_entropy(part, each, torch.tensor(FACTOR), lse, 1.0, 0.0, False)
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    losses, _ = exact(z, labels, 1.0, 0.0)
    torch.testing.assert_close((lse - sum(picked))[~ignored].double(), losses[~ignored])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("scale", "cap"), FORMULAS.values(), ids=FORMULAS)
@pytest.mark.parametrize("columns", [*COLUMNS, 128_256])
def test_on_a_gpu_it_is_the_reference(columns, scale, cap, dtype):
    z, labels = example(columns, dtype)
    expected = by_reference(z, labels, scale, cap, True)
    z = z.cuda()
    lse, picked, data, scales = cross_entropy(z, labels.cuda(), torch.tensor(FACTOR).cuda(), None, scale, cap, True)
    live = labels != IGNORED
    # Of numbers down to e^-90, whose logit is rounded in float32
    step = {torch.float32: 3e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    smallest = 2**-24 if dtype == torch.float16 else 1e-30
    assert ((z.cpu().float() - expected[0].float()).abs() <= step * expected[0].float().abs() + smallest).all()
    torch.testing.assert_close(lse.cpu()[live], expected[1][live], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(picked.cpu(), expected[2], rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(scales.cpu(), expected[4], rtol=1e-5, atol=0)
    data, wide = data.cpu().float(), expected[3].float()
    assert ((data - wide).abs() <= (wide.abs() / 8).clamp(min=2**-9)).all()  # at most a step
    assert float((data != wide).float().mean()) < 1e-3


@pytest.mark.gpu
def test_on_a_gpu_it_computes_the_same_in_every_run():
    z = 4 * torch.randn(512, 128_256, device="cuda", dtype=torch.bfloat16)
    labels, factor = torch.randint(128_256, (512,), device="cuda"), torch.tensor(1.0, device="cuda")
    first = None
    for _ in range(20):
        g = z.clone()
        lse, _, data, _ = cross_entropy(g, labels, factor, None, 1.0, 0.0, True)
        results = [g, lse, data.view(torch.uint8)]
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
