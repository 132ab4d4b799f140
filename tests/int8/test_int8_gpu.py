"""INT8 on CUDA: the bytes of the reference, and a packed model beside the CPU's."""

from pathlib import Path

import pytest
import torch
from bits import assert_same
from gpu_memory import poison
from metrics import distance
from runtime_examples import logits, make_decoder, tokens

import octavo
from octavo.int8 import int8_mm
from octavo.int8.reference import int8_mm_reference
from octavo.numerics import Cast
from octavo.ops import quantize
from octavo.ops.quantization.reference import quantize_reference
from octavo.packing import pack

pytestmark = pytest.mark.gpu

INT8 = Cast("int8")
# m, n, k: one row, no multiples of a tile, a K that is split, tiles of 128 rows and more
SIZES = [(1, 4096, 4096), (5, 515, 160), (16, 512, 14336), (64, 77, 1056), (100, 333, 80), (300, 1000, 4096)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (33, 4096), (7, 14336), (5, 1000)])
def test_rows_are_quantized_to_the_bytes_of_the_reference(shape, dtype):
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.logspace(-3, 3, shape[0])[:, None]).to(dtype)
    x[0, :3] = torch.tensor([0.5, 1.5, -2.5])
    if shape[0] > 4:
        x[2], x[3, 1], x[4, 2] = 0, torch.nan, torch.inf
    poison()
    q = quantize(x.cuda(), INT8)
    data, scale = quantize_reference(x, INT8, None, None, None)
    assert_same(q.data, data)
    assert torch.equal(q.scale.cpu().nan_to_num(-1), scale.nan_to_num(-1))


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_the_gemm_gives_the_bytes_of_the_reference(m, n, k):
    torch.manual_seed(m)
    a, b = quantize(torch.randn(m, k), INT8), quantize(torch.randn(n, k) * torch.logspace(-2, 1, n)[:, None], INT8)
    bias, residual = torch.randn(n).bfloat16(), torch.randn(m, n).bfloat16()
    on_gpu = [type(q)(q.data.cuda(), q.scale.cuda(), q.format, q.granularity) for q in (a, b)]
    exact = int8_mm_reference(a.data, a.scale, b.data, b.scale)
    poison()
    assert_same(int8_mm(*on_gpu, out_dtype=torch.float32), exact)
    assert_same(int8_mm(*on_gpu, bias=bias.cuda()), (exact + bias).bfloat16())
    y = int8_mm(*on_gpu, bias=bias.cuda(), residual=residual.cuda())
    assert_same(y, (exact + bias).bfloat16() + residual)


def test_the_largest_sums_do_not_overflow():
    """127 * 127 * 131072, twice with K split, is above 2^30."""
    data = torch.full((2, 131_072), 127, dtype=torch.int8, device="cuda")
    ones = torch.ones(2, 1, device="cuda")
    q = quantize(torch.ones(1, 16, device="cuda"), INT8)
    q = type(q)(data, ones, q.format, q.granularity)
    assert_same(int8_mm(q, q, out_dtype=torch.float32), torch.full((2, 2), 127.0**2 * 131_072))


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_a_packed_model_gives_what_the_cpu_gives(tmp_path: Path):
    make_decoder("llama with biases", hidden_size=256, intermediate_size=544, head_dim=64).save_pretrained(
        tmp_path / "model"
    )
    pack(tmp_path / "model", tmp_path / "packed", scheme="int8")
    gpu, cpu = octavo.load(tmp_path / "packed", "cuda"), octavo.load(tmp_path / "packed")
    for length in (1, 13, 90):
        text = tokens(length).clamp(max=98)[:1]
        expected = logits(gpu, text.cuda()).cpu()
        assert distance(expected, logits(cpu, text)) < 0.05  # BF16 moves inputs to the next integer
    for layer in gpu.model.layers:
        layer.compile(fullgraph=True, dynamic=False)
    assert distance(logits(gpu, text.cuda()).cpu(), expected) < 0.05
