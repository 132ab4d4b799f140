"""The cross-entropy of a head on a GPU: in BF16 with FP32 sums, and what it takes of the memory."""

import pytest
import torch
import torch.nn.functional as F
from gpu_memory import poison

from octavo.train.head_loss import linear_cross_entropy

pytestmark = pytest.mark.gpu

TOKENS, WIDTH, VOCABULARY = 4096, 512, 50_000


def plain(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight).float(), targets)


def chunked(x, weight, targets):
    return linear_cross_entropy(x, weight, targets, chunk=512)


def measured(loss_of):
    """The loss, dx and dw under autocast, and the peak of the memory above that of the arguments."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, device="cuda", requires_grad=True)
    weight = (torch.randn(VOCABULARY, WIDTH, device="cuda") / 8).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), device="cuda")
    poison()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        loss = loss_of(x, weight, targets)
    (loss / 3).backward()
    peak = torch.cuda.max_memory_allocated() - before
    return [loss.detach(), x.grad, weight.grad], peak


def errors(found):
    """The largest error of each, relative to the largest element, against float64."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, device="cuda", requires_grad=True)
    weight = (torch.randn(VOCABULARY, WIDTH, device="cuda") / 8).requires_grad_()
    targets = torch.randint(VOCABULARY, (TOKENS,), device="cuda")
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    loss = F.cross_entropy(x @ weight.T, targets)
    (loss / 3).backward()
    expected = [loss.detach(), x.grad, weight.grad]
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]


def test_it_is_as_exact_as_the_plain_loss_in_a_fraction_of_the_memory():
    (whole, most), (found, peak) = measured(plain), measured(chunked)
    for error, limit in zip(errors(found), errors(whole), strict=True):
        assert error <= 1.2 * limit
    logits, weight = TOKENS * VOCABULARY, VOCABULARY * WIDTH
    assert most > 10 * logits  # BF16 logits, their FP32 copy, log-softmax in FP32
    # of a chunk: logits and g in BF16, log-softmax in FP32; of the weight: a BF16 copy, and the FP32 gradient
    assert peak < (2 + 2 + 4) * logits / 8 + (2 + 4) * weight + 16 * TOKENS * WIDTH


def test_compiled_it_is_the_same():
    (whole, _), (found, _) = measured(chunked), measured(torch.compile(chunked, fullgraph=True))
    for error, limit in zip(errors(found), errors(whole), strict=True):
        assert error <= 1.2 * limit
