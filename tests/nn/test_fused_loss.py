"""The loss from the inputs of a head, a chunk of tokens at a time, against float64 and the plain loss."""

import pytest
import torch
import torch.nn.functional as F
from operation_counts import LiveMemory, operations
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from octavo.nn.fused_loss import linear_cross_entropy

BATCH, TOKENS, WIDTH, VOCABULARY_HEAD, CHUNK = 2, 25, 24, 130, 16


def example(dtype=torch.float32):
    torch.manual_seed(0)
    x = torch.randn(BATCH, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY_HEAD, WIDTH, dtype=dtype, requires_grad=True)
    return x, weight, torch.randint(VOCABULARY_HEAD, (BATCH, TOKENS))


def plain(x, weight, targets):
    logits = F.linear(x, weight).flatten(0, 1)
    return F.cross_entropy(logits if x.dtype == torch.float64 else logits.float(), targets.flatten())


def results(loss_of, *args, autocast=False, **options):
    """The loss, dx and dw, in float64; the loss is scaled as a trainer with 3 micro-batches scales it."""
    x, weight, targets = (t.detach().clone().requires_grad_(t.requires_grad) for t in args)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = loss_of(x, weight, targets, **options)
    (loss / 3).backward()
    assert (x.grad.dtype, weight.grad.dtype) == (x.dtype, weight.dtype)
    return [t.detach().double() for t in (loss, x.grad, weight.grad)]


def largest_errors(found, expected):
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("chunk", [1, CHUNK, 50, 1000])
def test_in_float32_it_is_the_loss_in_float64_up_to_rounding(chunk):
    x, weight, targets = example()
    expected = results(plain, x.double(), weight.double(), targets)
    assert max(largest_errors(results(linear_cross_entropy, x, weight, targets, chunk=chunk), expected)) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_bf16_it_is_as_exact_as_the_plain_loss(dtype):
    """Under autocast, and with BF16 weights. The products round to BF16 in both, only the sums over tokens differ."""
    args, autocast = example(dtype), dtype == torch.float32
    expected = results(plain, *(t.double() if t.is_floating_point() else t for t in args))
    found = results(linear_cross_entropy, *args, autocast=autocast, chunk=CHUNK)
    limits = largest_errors(results(plain, *args, autocast=autocast), expected)
    for error, limit in zip(largest_errors(found, expected), limits, strict=True):
        assert error <= 1.1 * limit
    assert abs(float(found[0]) - float(results(plain, *args, autocast=autocast)[0])) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "recipe", "limit"), [(torch.float16, "bf16", 2e-3), (torch.bfloat16, "rowwise", 0.15)]
)
def test_over_several_chunks_in_fp16_and_with_a_head_in_fp8(dtype, recipe, limit):
    """The gradients of FP16 are divided by the number of tokens in the backward pass."""
    args = example(dtype)
    expected = results(plain, *(t.double() if t.is_floating_point() else t for t in args))
    assert max(largest_errors(results(linear_cross_entropy, *args, chunk=CHUNK, recipe=recipe), expected)) < limit


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_side_gets_no_gradient(frozen):
    args = list(example())
    _, *expected = results(linear_cross_entropy, *args, chunk=CHUNK)
    args[frozen].requires_grad_(False)
    linear_cross_entropy(*args, chunk=CHUNK).backward()
    assert args[frozen].grad is None
    torch.testing.assert_close(args[1 - frozen].grad.double(), 3 * expected[1 - frozen])


def test_evaluation_computes_the_logits_only():
    args = example()
    with torch.no_grad():
        seen = operations(lambda: linear_cross_entropy(*args, chunk=CHUNK))
        assert sum(count for name, count in seen.items() if "mm" in name) == -(-BATCH * TOKENS // CHUNK)
        torch.testing.assert_close(linear_cross_entropy(*args, chunk=CHUNK), plain(*args))


def test_a_second_backward_or_derivative_is_an_error():
    loss = linear_cross_entropy(*(args := example()), chunk=CHUNK)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(loss, args[0], create_graph=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_it_compiles_without_a_graph_break():
    args = example()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend="aot_eager")
    found = results(compiled, *args, chunk=CHUNK)
    assert max(largest_errors(found, results(linear_cross_entropy, *args, chunk=CHUNK))) < 1e-6
    args[2][0, 0] = VOCABULARY_HEAD  # is no label, for which compiled code does not look on the host
    assert all(each.isnan().all() for each in results(compiled, *args, chunk=CHUNK))


def split_vocabulary(rank, recipe):
    """The rank's results with a weight sharded by rows; of x the whole, or the rank's share of the tokens."""
    mesh = init_device_mesh("cpu", (2,))
    x, weight, targets = example()
    x, targets = x.detach()[:, :24].requires_grad_(), targets[:, :24]
    expected = results(linear_cross_entropy, x, weight, targets, chunk=CHUNK, recipe=recipe)
    found = []
    for part in (x, x.detach()[:, 12 * rank : 12 * rank + 12].requires_grad_()):
        shard = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)]))
        loss = linear_cross_entropy(part, shard, targets, chunk=CHUNK, recipe=recipe)
        (loss / 3).backward()
        found.append([loss.detach().double(), part.grad.double(), shard.grad.full_tensor().double()])
        part.grad = None
    loss, dx, dw = expected
    own = [loss, dx[:, 12 * rank : 12 * rank + 12], dw]
    return [largest_errors(*pair) for pair in zip(found, (expected, own), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "most"), [("bf16", 2e-6), ("rowwise", 0.25)])  # in FP8 parts have own scales
def test_a_vocabulary_split_over_ranks_gives_the_same(recipe, most):
    for errors in run_ranks(2, split_vocabulary, recipe):
        assert max(max(each) for each in errors) < most


@pytest.mark.parametrize("chunks", [3, 5])
def test_the_logits_of_one_chunk_are_in_memory(chunks):
    """And log p, of the same size: nothing of the chunk before is left when the next one begins."""

    def peak(tokens):
        x, targets = torch.randn(tokens, WIDTH, requires_grad=True), torch.randint(VOCABULARY_HEAD, (tokens,))
        with LiveMemory(known=[x, weight, targets]) as memory:
            linear_cross_entropy(x, weight, targets, chunk=CHUNK).backward()
        return memory.peak - 4 * tokens * (WIDTH + 1)  # dx, and log p of the targets

    weight = torch.randn(VOCABULARY_HEAD, WIDTH, requires_grad=True)
    assert peak(chunks * CHUNK) < 1.05 * peak(2 * CHUNK)  # dw begins after the first chunk's logits
    assert peak(2 * CHUNK) < 4 * VOCABULARY_HEAD * (WIDTH + 2.5 * CHUNK)  # dw, the logits, log p
