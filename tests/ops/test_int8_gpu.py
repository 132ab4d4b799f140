"""INT8 on CUDA: the bytes of the reference, and a packed model beside the CPU's."""

import pytest
import torch
from bits import assert_same
from gpus import poison
from metrics import distance
from operation_counts import operations
from runtime_examples import layer_by_layer, logits, tokens
from tiny_models import folder_maker

import octavo
from octavo.numerics import Cast, QTensor
from octavo.ops import quantize
from octavo.ops.int8_gemm import int8_mm, int8_mm_reference
from octavo.ops.launching import Operands

pytestmark = pytest.mark.gpu

INT8 = Cast("int8")
# m, n, k: one row, no multiples of a tile, a K that is split, tiles of 128 rows and more
SIZES = [(1, 4096, 4096), (5, 515, 160), (16, 512, 14336), (64, 77, 1056), (100, 333, 80), (300, 1000, 4096)]


def exact_product(a: QTensor, b: QTensor) -> torch.Tensor:
    return int8_mm_reference(Operands.of(a, b), None, None, torch.float32)


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_the_gemm_gives_the_bytes_of_the_reference(m, n, k):
    torch.manual_seed(m)
    a, b = quantize(torch.randn(m, k), INT8), quantize(torch.randn(n, k) * torch.logspace(-2, 1, n)[:, None], INT8)
    bias, residual = torch.randn(n).bfloat16(), torch.randn(m, n).bfloat16()
    operands = [type(q)(q.data.cuda(), q.scale.cuda(), q.format, q.granularity) for q in (a, b)]
    exact = exact_product(a, b)
    poison()
    assert_same(int8_mm(*operands, out_dtype=torch.float32), exact)
    assert_same(int8_mm(*operands, bias=bias.cuda()), (exact + bias).bfloat16())
    y = int8_mm(*operands, bias=bias.cuda(), residual=residual.cuda())
    assert_same(y, (exact + bias).bfloat16() + residual)
    y = int8_mm(*operands, residual=residual.float().cuda(), out_dtype=torch.float32)
    assert_same(y, exact + residual.float())  # the product by the scales is rounded before the sum


@pytest.mark.parametrize("m", [65, 1000, 4097])
def test_sums_of_many_rows_are_scaled_in_parts(m, monkeypatch):
    from octavo.ops.kernels import int8_gemm as kernel

    monkeypatch.setattr(kernel, "MAX_SUMS", 512 * 1024)
    torch.manual_seed(m)
    a, b = quantize(torch.randn(m, 256), INT8), quantize(torch.randn(1024, 256), INT8)
    assert kernel.uses_cublas(m, 1024, 256)
    operands = Operands(a.data.cuda(), b.data.cuda(), a.scale.cuda(), b.scale.cuda(), a.granularity, b.granularity)
    bias, residual = torch.randn(1024), torch.randn(m, 1024).bfloat16()
    poison()
    y = kernel.int8_mm(operands, bias.cuda(), residual.cuda(), torch.bfloat16)
    assert_same(y, (exact_product(a, b) + bias).bfloat16() + residual)


def test_k_is_split_for_more_rows_than_a_grid_has_in_y(monkeypatch):
    from octavo.ops.kernels import int8_gemm as kernel

    a, b = (quantize(torch.randn(rows, 256, device="cuda"), INT8) for rows in (67_000, 16))
    monkeypatch.setattr(kernel, "uses_cublas", lambda *_: False)
    monkeypatch.setattr(kernel, "choose", lambda *_: (128, 128, 128, 3, 8, 2))
    poison()
    y = kernel.int8_mm(Operands.of(a, b), None, None, torch.float32)
    assert_same(y, exact_product(a, b))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    make = folder_maker(tmp_path_factory.mktemp("int8"), hidden_size=256, intermediate_size=544, head_dim=64)
    return make("llama with biases", scheme="int8")


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_packed_model_gives_what_the_cpu_gives(folder):
    gpu, cpu = octavo.load(folder, "cuda"), octavo.load(folder)
    for length in (1, 13, 300):
        text = tokens(length)[:1]
        expected = logits(gpu, text.cuda()).cpu()
        assert distance(expected, logits(cpu, text)) < 0.1  # BF16 moves inputs to the next integer
        assert distance(expected, logits(layer_by_layer(gpu), text.cuda()).cpu()) < 0.1
    seen = operations(lambda: logits(gpu, text.cuda()))
    assert (seen["octavo::int8_mm"], seen["octavo::norm_quantize"], seen["octavo::activation_quantize"]) == (8, 4, 2)
    for layer in gpu.model.layers:
        layer.compile(fullgraph=True, dynamic=False)
    assert distance(logits(gpu, text.cuda()).cpu(), expected) < 0.1


@pytest.mark.filterwarnings("ignore")
def test_in_float32_the_layers_give_what_the_cpu_gives(folder):
    gpu, cpu = octavo.load(folder, "cuda").float(), octavo.load(folder).float()
    text = tokens(90)[:1]
    exact = logits(cpu, text)
    assert distance(logits(gpu, text.cuda()).cpu(), exact) < 0.02
    assert distance(logits(layer_by_layer(gpu), text.cuda()).cpu(), exact) < 0.02
