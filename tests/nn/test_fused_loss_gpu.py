"""The loss from the inputs of a head on a GPU: its errors against float64, its memory, and models that compute it."""

import pytest
import torch
import torch.nn.functional as F
from gpus import poison

import octavo
from octavo.nn.fused_loss import linear_cross_entropy

pytestmark = pytest.mark.gpu

TOKENS, WIDTH, VOCABULARY = 4096, 512, 50_000


def plain(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight).float(), targets)


def chunked(x, weight, targets):
    return linear_cross_entropy(x, weight, targets, chunk=512)


def example():
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, device="cuda", requires_grad=True)
    weight = (torch.randn(VOCABULARY, WIDTH, device="cuda") / 8).requires_grad_()
    return x, weight, torch.randint(VOCABULARY, (TOKENS,), device="cuda")


def measured(loss_of, dtype=torch.float32, **options):
    """The loss, dx and dw, in float32 under autocast, and the peak of the memory above that of the arguments."""
    x, weight, targets = example()
    x, weight = (t.detach().to(dtype).requires_grad_() for t in (x, weight))
    poison()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.float32):
        loss = loss_of(x, weight, targets, **options)
    (loss / 3).backward()
    peak = torch.cuda.max_memory_allocated() - before
    return [loss.detach(), x.grad, weight.grad], peak


def errors(found):
    """The relative error of each against float64; of a gradient that of its norm."""
    x, weight, targets = example()
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    loss = F.cross_entropy(x @ weight.T, targets)
    (loss / 3).backward()
    expected = [loss.detach(), x.grad, weight.grad]
    return [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]


def test_it_is_as_exact_as_the_plain_loss_in_a_fraction_of_the_memory():
    (whole, most), (found, peak) = measured(plain), measured(chunked)
    for error, limit in zip(errors(found), errors(whole), strict=True):
        assert error <= 1.1 * limit + 1e-6
    logits, weight = TOKENS * VOCABULARY, VOCABULARY * WIDTH
    assert most > 10 * logits  # BF16 logits, their FP32 copy, log-softmax in FP32
    # of a chunk: the logits in BF16, and g in their place; of the weight: a BF16 copy, and the FP32 gradient
    assert peak < 2 * logits / 8 + (2 + 4) * weight + 16 * TOKENS * WIDTH


def test_compiled_it_is_the_same():
    (whole, _), (found, _) = measured(chunked), measured(torch.compile(chunked, fullgraph=True))
    for error, limit in zip(errors(found), errors(whole), strict=True):
        assert error <= 1.1 * limit + 1e-6


@pytest.mark.parametrize("chunk", [1000, 2048, 4096])
def test_bf16_weights_get_a_gradient_that_is_as_exact_as_that_of_the_plain_loss(chunk):
    (found, _), (whole, _) = (
        measured(linear_cross_entropy, torch.bfloat16, chunk=chunk),
        measured(plain, torch.bfloat16),
    )
    for error, limit in zip(errors(found), errors(whole), strict=True):
        assert error <= 1.1 * limit + 1e-6


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs FP8 GEMMs")
def test_a_head_in_fp8_is_as_exact_as_a_layer_in_fp8():
    exact, _ = measured(plain, torch.bfloat16)
    options = {"chunk": 1000, "recipe": "rowwise"}  # the last chunk is no multiple of 16
    (loss, *gradients), _ = measured(linear_cross_entropy, torch.bfloat16, **options)
    assert abs(float(loss - exact[0])) < 2e-2 * float(exact[0])
    for found, expected in zip(gradients, exact[1:], strict=True):
        assert float((found - expected).float().norm() / expected.float().norm()) < 0.06  # 24 dB


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
def test_a_model_of_transformers_trains_with_it(recipe, compiled):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=40_000)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config).bfloat16()
    ids = torch.randint(40_000, (2, 512), device="cuda")
    results = []
    for fuse_loss in (False, True):
        octavo.convert(model, recipe, fuse_loss=fuse_loss)
        call = torch.compile(model) if compiled else model
        output = call(ids, labels=ids)
        output.loss.backward()
        assert (output.logits is None) == fuse_loss
        results.append([output.loss.detach(), *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
        torch._dynamo.reset()
    # The loss in chunks changes last bits of its dx in BF16, and a cast to E4M3 turns some of them into steps of 2^-4.
    # Keys of the first layer have the smallest gradients: they differ by 0.012 to 0.047.
    largest = 0.02 if recipe == "bf16" else 0.06
    for found, expected in zip(*reversed(results), strict=True):
        assert float((found - expected).float().norm() / expected.float().norm()) < largest
